"""Scripts at toy sizes: each writes a machine's line and rows, which its table reads where it has one."""

from types import SimpleNamespace

import pytest
import torch

from bench import jax_loss, precision, two_looks
from bench.cpu import best_entries
from bench.harness import read_lines
from bench.lm_eval import compare
from bench.long_context import nsa, steps, train
from bench.real import gemma, statistics, stored
from bench.real.text import KINDS, Reading
from bench.sampling import masks
from docs.tables import jax, long_context, real
from docs.tables import precision as precision_page
from logitless import LMHead
from logitless.vocab.call import compiled_support
from tests.support.switches import put_back


@pytest.fixture(autouse=True)
def same_threads():
    with put_back():
        yield


def run(script, out, arguments):
    """The machine's line and the rows that a script writes."""
    script.main([*arguments.split(), "--out", str(out)])
    machine, *rows = read_lines(out)
    assert machine["kind"] == "environment"
    assert rows
    return machine, rows


def test_two_looks(tmp_path):
    machine, (row,) = run(two_looks, tmp_path / "out", "--tokens 12 --vocab 300 --hidden 16 --rounds 1")
    assert (machine["threads"], row["sizes"]["tokens"]) == (1, 12)
    assert len(row["rows"]) == 2 * 8
    assert all(x["cpu_seconds"] > 0 and x["peak_bytes"] > 0 for x in row["rows"])


def test_sampling_masks(tmp_path):
    _, (row,) = run(masks, tmp_path / "out", "--tokens 12 --vocab 400 --hidden 16 --rounds 1")
    assert row["sizes"] == {"tokens": 12, "vocab": 400, "hidden": 16, "threads": 1, "rounds": 1}
    assert [x["method"] for x in row["rows"]] == ["over the sets", "whole rows, token_loss", "dense logits with a mask"]


def test_sparse_attention(tmp_path):
    sizes = "--lengths 64 128 --heads 2 --kv-heads 1 --dim 16 --threads 1 --rounds 1"
    machine, rows = run(nsa, tmp_path / "out", sizes)
    assert "| 128 | " in long_context.sparse([machine, *rows])
    assert "2 heads of 16, 1 of keys" in long_context.sparse([machine, *rows])


@pytest.mark.slow
def test_the_steps_of_a_peak(tmp_path):
    machine, rows = run(steps, tmp_path / "out", "--model tiny --context-length 64")
    assert long_context.steps([machine, *rows]).count(" GiB |") == 2 * len(steps.CHANGES)


@pytest.mark.slow
def test_in_jax(tmp_path):
    machine, rows = run(jax_loss, tmp_path / "out", "--tokens 16 --hidden 8 --vocab 512 --keep 4 --repeats 1")
    assert {r["method"] for r in rows if r["work"] == "loss and gradients"} == {
        "logitless", "dense", "bare products, slices of 256", "bare products, slices of 512"
    }  # fmt: skip
    table = jax.in_jax([machine, *rows])
    ratios = [line.split(" | ")[4] for line in table.splitlines() if "bare products" in line]
    assert min(ratios[:2]) == min(ratios[2:]) == "1.00"  # over the fastest of them


def test_precision(tmp_path, monkeypatch):
    for name, size in {"TOKENS": 8, "HIDDEN": 64, "VOCAB": 4096}.items():
        monkeypatch.setattr(precision, name, size)
    machine, rows = run(precision, tmp_path / "out", "")
    assert "N=8, H=64, V=4,096" in precision_page.precision([machine, *rows])


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.skipif(compiled_support.why_not("cpu") is not None, reason="needs a compiler")
def test_best_entries(tmp_path):
    _, rows = run(best_entries, tmp_path / "out", "--size quick --rounds 1")
    assert [r["kind"] for r in rows[:5]] == ["whole calls"] * 5
    assert rows[-1]["both"] > 0


@pytest.mark.parametrize("script", [statistics, stored])
def test_what_a_model_makes_of_text(script, tmp_path, monkeypatch):
    torch.manual_seed(0)
    hidden, head = torch.randn(30, 16), LMHead(torch.randn(1100, 16))
    kinds = [kind for kind in KINDS for _ in range(10)]
    reading = Reading(None, None, hidden, head, torch.randint(1100, (30,)), kinds)
    monkeypatch.setattr(script, "read", lambda *_: reading)
    machine, rows = run(script, tmp_path / "out", "--model m --texts 1 --length 10")
    assert (machine["model"], machine["texts"], machine["length"]) == ("m", 1, 10)
    assert all(row["tokens"] > 0 for row in rows)


def test_lm_evals_classes_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "apart", lambda kind, *_: {"totals": [2.0, 8.0 if kind == "hf" else 6.0]})
    machine, rows = run(compare, tmp_path / "out", "")
    assert (machine["threads"], machine["limit"]) == (1, 12)
    assert [(row["task"], row["largest_relative_difference"]) for row in rows] == [(x, 0.25) for x in compare.TASKS]


def test_a_model_trained_in_full(tmp_path, monkeypatch):
    def train(place, loss, tokens, steps, o):
        row = {"loss": loss, "tokens": tokens, "steps": steps, "logits_bytes": tokens << 20}
        ended = {"failed": "out of memory"} if (loss, tokens) == ("dense", 8192) else {"step_seconds": [3, 5, 90]}
        return row | {"peak_resident_bytes": 2 << 30, **ended}

    monkeypatch.setattr(gemma, "train", train)
    machine, rows = run(gemma, tmp_path / "out", "--threads 1")
    table = real.gemma([machine, *rows])
    assert "| logitless | 8,192 | 8 GiB | 20 | 2.0 GiB | 5 s |" in table
    assert "| dense | 8,192 | 8 GiB | 1 | 2.0 GiB | out of memory |" in table
    assert "1 thread," in table


@pytest.mark.parametrize("begun", [False, True])
def test_a_long_run_goes_on_where_there_is_one(begun, tmp_path, monkeypatch):
    run_folder, commands = tmp_path / "run", []
    run_folder.mkdir()  # as a run leaves it that was killed before its options were written
    if begun:
        (run_folder / "run.json").touch()

    def ended(command, **_):
        commands.append(command)
        (run_folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
        (run_folder / "summary.json").write_text('{"parameters": 7}')

    monkeypatch.setattr(train, "subprocess", SimpleNamespace(run=ended))
    machine, rows = run(train, tmp_path / "out", f"--keep {tmp_path} --threads 1")
    assert ("--resume" in commands[0]) is begun
    assert "| parameters | 7 (hidden 128, 2 layers) |" in long_context.run([machine, *rows])
