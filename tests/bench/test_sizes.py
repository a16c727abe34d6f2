"""How times grow with sizes, which slices are fastest, and a whole training step: the scripts at tiny sizes."""

import math
from functools import partial

import pytest
import torch
from PIL import Image

from bench import in_turn, peers, scaling, train_step
from bench.cases import Shape
from bench.cpu import bf16, calls_in_columns, columns, cores, few_tokens, levels, slices
from bench.harness import THREADS, read_lines
from docs.tables.cpu import slices as slices_page
from docs.tables.cpu import train_step as step_page
from docs.tables.scaling import scaling as scaling_page
from logitless.algebra import costs
from logitless.vocab.backends.eager import backend
from logitless.vocab.backends.eager.weights import weights_grad
from logitless.workbench.sft.config import TrainConfig
from tests.support.switches import put_back
from tests.support.workbench.micro import micro_corpus, micro_directory

SWEEPS = {
    "vocab": [Shape(16, 8, size) for size in (64, 128, 256)],
    "tokens": [Shape(size, 8, 16) for size in (64, 128, 256)],
    "hidden": [Shape(16, size, 32) for size in (32, 64, 128)],
}


@pytest.fixture(autouse=True)
def same_threads():
    with put_back():
        yield


def test_a_size_at_a_time_grows_and_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "SWEEPS", SWEEPS)
    monkeypatch.setattr(scaling, "OF_THREADS", Shape(16, 8, 64))
    monkeypatch.setattr(scaling, "LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(scaling, "SHOWN", {k: v for k, v in scaling.SHOWN.items() if k != "compiled"})
    out = tmp_path / "scaling.jsonl"
    scaling.main(["--rounds", "1", "--out", str(out)])
    records = read_lines(out)
    rows = [r for r in records if r["kind"] == "scaling"]
    assert [(r["case"], r["sweep"], r["threads"]) for r in rows] == [
        (case, sweep, threads) for case in ("loss", "entropy") for sweep, _, threads in scaling.points()
    ]
    for row in rows:
        n, _, v = row["shape"]
        assert row["methods"]["dense"]["peak_mb"] > 4e-6 * n * v
        assert min(m["seconds"] for m in row["methods"].values()) > 0
    assert f"| tokens | 256, 8, 16 | {THREADS} |" in scaling_page(records)
    assert "freed memory is given back." in scaling_page(records)
    scaling.main(["--out", str(out), "--png", str(tmp_path / "figure.png")])
    with Image.open(tmp_path / "figure.png") as figure:
        assert min(figure.size) > 500


def test_the_page_says_how_time_grows_and_what_fills_a_machine():
    def row(sweep, *shape, seconds, peak):
        methods = {"bare": {"seconds": seconds / 2, "peak_mb": 0}, "logitless": {"seconds": seconds, "peak_mb": peak}}
        about = {"kind": "scaling", "case": "loss", "sweep": sweep, "shape": shape, "threads": 2, "others": 0.1}
        return about | {"methods": methods}

    machine = {"kind": "environment", "cpu": "a processor", "versions": {"torch": "2.13.0"}, "date": "2026-11-23"}
    machine |= {"rounds": 3}
    rows = [  # 4 bytes for each number of the inputs, and as many again
        *(row("vocab", 10, 50, n, seconds=n, peak=2e-4 * n) for n in (1000, 2000, 4000)),
        *(row("tokens", n, 50, 10, seconds=n * n, peak=2e-4 * n) for n in (1000, 2000, 4000)),
        *(row("hidden", 10, n, 50, seconds=1, peak=0) for n in (1000, 2000, 4000)),
    ]
    page = scaling_page([machine, *rows])
    assert "| entries | 10, 50, 4,000 | 2 | 2000.00 s | 2.00 × / 1 MB |" in page
    assert "(entries: bare 1.0, logitless 1.0; tokens: bare 2.0, logitless 2.0; width: bare 0.0, logitless 0.0)" in page
    assert "tokens at H=50, V=10: logitless 60,000,000; width at N=10, V=50: logitless 100,000,000;" in page
    assert "entries at N=10, H=50: logitless 60,000,000." in page
    assert "Least of 3 rounds; freed memory is given back." in page
    assert "up to 10% of the machine" in page


def test_every_size_of_slices_is_tried_and_none_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "SHAPE", Shape(8, 8, 300))
    constants = [name for work in slices.WORKS.values() for name in work]
    before = [getattr(costs, name) for name in constants]
    seen = []
    real = slices.timed
    monkeypatch.setattr(slices, "timed", lambda step: seen.append((costs.CPU_TILE, costs.WHOLE_WIDTH)) or real(step))
    slices.main(["--rounds", "1", "--out", str(tmp_path / "slices.jsonl")])
    assert [getattr(costs, name) for name in constants] == before
    machine, *records = read_lines(tmp_path / "slices.jsonl")
    assert machine["shape"] == [8, 8, 300]
    assert len(records) == len(seen) == 4 * 4 + 5 * 5
    assert len(set(seen)) == 4 + 5 - 1  # each tile, each width; the pass's own of both is one pair
    assert slices_page([machine, *records]).count("**1.00**") == len(slices.WORKS)  # the pass's own are among them


def test_products_of_both_orders_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "HIDDEN", 8)
    monkeypatch.setattr(columns, "WHOLE_WIDTH", 64)
    monkeypatch.setattr(columns, "VOCAB", 128)
    columns.main(["--tokens", "4,16", "--rounds", "2", "--threads", "1", "--out", str(tmp_path / "columns.jsonl")])
    records = read_lines(tmp_path / "columns.jsonl")
    assert len(records) == 2 * (4 + 3)
    assert all(0 < r["least"] <= r["most"] for r in records)
    assert {r["tokens"] for r in records if r["columns"]} == {4, 16}


def test_calls_are_timed_in_columns_and_in_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calls_in_columns, "HIDDEN", 8)
    monkeypatch.setattr(calls_in_columns, "VOCAB", 2048)
    trips = iter([60, 60, 60, 60] + [300, 300, 60, 300] * 3)
    monkeypatch.setattr(calls_in_columns, "round_trip", lambda: next(trips))
    asked, usual = [], backend.in_columns
    monkeypatch.setattr(backend, "in_columns", lambda *given: asked.append(usual(*given)) or asked[-1])
    calls_in_columns.main(
        [
            *("--calls", "kl,trained", "--tokens", "40,64", "--backends", "eager", "--rounds", "1"),
            *("--threads", "2", "--out", str(tmp_path / "calls.jsonl")),
        ]
    )
    first, *others = read_lines(tmp_path / "calls.jsonl")
    assert first["near_ratio"] == first["near_columns_s"] / first["near_rows_s"] > 0
    assert len(others) == 3
    assert not any(place in str(r) for r in others for place in ("near_ratio", "far_ratio"))
    assert asked.count(True) == asked.count(False) > 0
    assert "kl, 64 tokens, eager: cores that moved" in capsys.readouterr().out


def test_a_bf16_head_is_timed_as_the_processor_has_it_and_in_fp32(tmp_path, capsys):
    bf16.main(["--shapes", "70x32x300", "--rounds", "1", "--threads", "1", "--out", str(tmp_path / "bf16.jsonl")])
    (found,) = read_lines(tmp_path / "bf16.jsonl")
    ways = {f"{name}, {way}" for name in ("values", "frozen", "loss") for way in ("bf16", "fp32")}
    plain = {f"plain {name}" for name in ("values", "frozen", "loss")}
    assert found["ns"].keys() == ways | plain | {"bare, 1", "bare, 2", "bare, 3"}
    assert min(found["ns"].values()) > 0
    assert found["error"]["plain values"] > 1e-3 > 1e-5 > found["error"]["values, bf16"]
    assert "70x32x300: values, bf16" in capsys.readouterr().out


def test_a_few_tokens_are_timed_in_either_dtype(tmp_path, capsys):
    few_tokens.main(
        [
            *("--heads", "32x300", "--tokens", "1,3", "--rounds", "1", "--threads", "1"),
            *("--out", str(tmp_path / "few.jsonl")),
        ]
    )
    found = read_lines(tmp_path / "few.jsonl")
    assert [x["shape"][0] for x in found] == [1, 3]
    ways = ("draw", "values", "bare", "dense draw", "dense draw with nuclei")
    assert found[0]["ms"].keys() == {f"{way}, {kind}" for way in ways for kind in ("fp32", "bf16")}
    assert min(found[0]["ms"].values()) > 0
    assert "3 x 32x300: draw, fp32" in capsys.readouterr().out


def test_a_loss_is_timed_with_a_level_and_with_maxima(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(levels, "TOKENS", 64)
    monkeypatch.setattr(levels, "HIDDEN", 8)
    monkeypatch.setattr(levels, "WHOLE_WIDTH", 100)
    asked = []

    def seen(*given):
        asked.append(backend.holds_weights is levels.no)
        weights_grad(*given)

    monkeypatch.setattr(backend, "weights_grad", seen)
    levels.main(
        ["--tokens", "32", "--vocab", "300", "--rounds", "1", "--threads", "1", "--out", str(tmp_path / "levels.jsonl")]
    )
    (found,) = read_lines(tmp_path / "levels.jsonl")
    assert set(found["ratios"]) == {"bare", "maxima, exp2", "maxima, exp", "level, exp2", "level, exp"}
    assert asked
    assert not any(asked)
    assert "32 tokens, 1 threads: bare 1.000" in capsys.readouterr().out


def test_operations_are_timed_by_where_the_cores_lie(tmp_path, monkeypatch, capsys):
    trips = iter([60, 60, 300, 300, 60, 300, 300, 300])
    monkeypatch.setattr(cores, "round_trip", lambda: next(trips))
    measured = partial(cores.measured, number=2, shape=(40, 64, 8))
    monkeypatch.setattr(cores, "measured", measured)
    cores.main(["--rounds", "2", "--out", str(tmp_path / "cores.jsonl")])
    records = read_lines(tmp_path / "cores.jsonl")
    # the second round moved between its looks: that of torch's shares counts nowhere
    assert [(r["shared"], r["far"], r["rounds"]) for r in records] == [(False, False, 1), (True, True, 2)]
    assert all(x > 0 for r in records for x in r["microseconds"].values())
    assert "each its entries, far cores: logits" in capsys.readouterr().out


def test_calls_in_turn_are_told_apart_by_where_the_cores_lie(tmp_path, monkeypatch, capsys):
    n = len(peers.chosen(["entropy"], (), ("ours", "floor"))["entropy"])
    trips = iter([60, 60] * (n - 1) + [60, 300] + [300, 300] * 20)
    monkeypatch.setattr(in_turn, "round_trip", lambda: next(trips))
    in_turn.main(["--cases", "entropy", "--shape", "48,16,301", "--rounds", "2", "--out", str(tmp_path / "turns")])
    (record,) = read_lines(tmp_path / "turns")
    methods = list(record["methods"].values())
    assert len(methods) == n >= 6
    assert [("near_s" in m, "far_s" in m) for m in methods] == [(True, True)] * (n - 1) + [(False, True)]
    least = [min(m.get("near_s", math.inf), m["far_s"]) for m in methods]
    assert [m["least_s"] for m in methods[:-1]] == least[:-1]
    assert methods[-1]["least_s"] <= least[-1]  # of the call, too, during which the cores were moved
    for to_bare in ("to_bare", "near_to_bare", "far_to_bare"):
        assert min(m[to_bare] for m in methods if to_bare in m) <= 1.0
    assert "x bare, near " in capsys.readouterr().out


def test_a_step_is_taken_by_both_losses(tmp_path, monkeypatch):
    model, data = micro_directory(tmp_path / "model"), micro_corpus(tmp_path / "data")
    config = TrainConfig(model=str(model), data=str(data), context_length=32, batch_size=2)
    seconds, sizes, busy = train_step.measured(config, rounds=2)
    assert {method: len(each) for method, each in seconds.items()} == {"logitless": 2, "dense": 2}
    assert sizes["tokens"] == 64
    monkeypatch.setattr(train_step, "measured", lambda *_: (seconds, sizes, busy))
    train_step.main(["--out", str(tmp_path / "step.jsonl")])
    records = read_lines(tmp_path / "step.jsonl")
    assert [r["freed_memory"] for r in records] == ["fresh", "kept"]
    assert records[0]["versions"]["torch"] == torch.__version__
    page = step_page(records)
    assert "| new at each step | dense | " in page
    assert "| of the step before | logitless | " in page
