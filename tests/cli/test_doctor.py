"""`logitless doctor`: what it says of this machine, and that its prices are those of the calls."""

import json
import re

import pytest
import torch

import logitless as ll
from logitless.cli.doctor import CALLS
from logitless.cli.main import main
from logitless.resident import peak_bytes, reset_peak
from logitless.units import one_unit
from logitless.vocab.call import triton_support
from tests.support.vocab.processors import needs_a_compiler
from tests.support.workbench.units import assert_one_unit

SMALL = ["--tokens", "64", "--hidden-size", "16", "--vocab-size", "301", "--dtype", "float32", "--device", "cpu"]


def report(capsys, *arguments):
    assert main(["doctor", *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert all(name in out for name in CALLS)
    assert "8,192 tokens, hidden 4,096, vocabulary 151,936, bfloat16, on cpu" in out
    assert_one_unit(out + "\nend", "8,192 tokens", "\nend")


def test_each_backend_runs_or_says_why_not(capsys, monkeypatch):
    monkeypatch.setattr(triton_support, "interpreted", lambda: False)
    found = report(capsys, *SMALL)
    assert found["schema"] == 1
    for b in found["backends"]:
        assert b["runs"] == (b["reason"] is None)
    states = {(b["device"], b["backend"]): b for b in found["backends"]}
    assert states["cpu", "eager"]["runs"]
    assert "needs a CUDA device, got cpu" in states["cpu", "triton"]["reason"]
    assert states["cpu", "quack"]["reason"] == "it needs a CUDA device, got cpu"
    assert found["versions"]["torch"] == torch.__version__


def test_without_triton(capsys, monkeypatch):
    monkeypatch.setattr(triton_support, "find_spec", lambda _: None)
    reasons = [b["reason"] for b in report(capsys, *SMALL)["backends"] if b["backend"] == "triton"]
    assert all("triton is not installed" in reason for reason in reasons)


def test_prices_and_slices_are_those_of_the_calls(capsys):
    found = {c["call"]: c for c in report(capsys, *SMALL, "--memory-budget", "100KB")["calls"]}
    prices = [1 if not CALLS[name][1] else c["gemms"] for name, c in found.items()]
    assert prices == [3, 2, 1, 2, 4, 4]
    hidden, weight = torch.randn(64, 16, requires_grad=True), torch.randn(301, 16, requires_grad=True)
    labels = torch.randint(301, (64,))
    said = ll.explain(hidden, ll.LMHead(weight), labels, memory_budget=100_000)
    call = found["log-prob, any upstream, trainable head"]
    assert (call["slice_tokens"], call["slice_entries"]) == (said.slices.tokens, said.slices.width)
    assert (call["buffer_bytes"], call["gradient_bytes"]) == (said.buffer_bytes, said.gradient_bytes)
    assert call["tflop"] == said.flop / 1e12
    assert call["logits_held"]


def test_the_table_says_what_the_json_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    calls = report(capsys, *SMALL)["calls"]
    assert main(["doctor", *SMALL]) == 0
    rows = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    sizes = [(c["buffer_bytes"] + c["saved_bytes"], c["gradient_bytes"], c["dense_bytes"]) for c in calls]
    assert any(c["saved_bytes"] for c in calls)
    said = one_unit(nbytes for row in sizes for nbytes in row)
    for c, of_call in zip(calls, sizes, strict=True):
        slices = f"{c['slice_tokens']} × {c['slice_entries']}"
        assert [c["call"], str(c["gemms"]), slices, *map(said, of_call)] in rows


@needs_a_compiler
def test_a_large_call_gets_the_backend_that_it_gets_unasked(capsys):
    sizes = ["--tokens", "512", "--hidden-size", "16", "--vocab-size", "70000", "--dtype", "float32", "--device", "cpu"]
    hidden, weight, labels = torch.randn(512, 16), torch.randn(70_000, 16), torch.randint(70_000, (512,))
    said = ll.explain(hidden, ll.LMHead(weight), labels, want=("logprob", "entropy"))
    call = next(c for c in report(capsys, *sizes)["calls"] if c["call"] == "log-prob + entropy, values")
    assert (call["backend"], call["logits_held"]) == (said.backend, not said.slices.in_products)
    assert (call["slice_tokens"], call["buffer_bytes"]) == (said.slices.tokens, said.buffer_bytes)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--memory-budget", "much"], "--memory-budget must be a size"),
        (["--device", "tpu"], "--device"),
    ],
)
def test_bad_input(arguments, line, capsys):
    assert main(["doctor", *arguments]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_a_gpu_that_is_not_there(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["doctor", "--device", "cuda"]) == 2
    assert "this torch sees no GPU" in capsys.readouterr().err


def test_sizes_take_no_memory(capsys, monkeypatch):
    """A machine without the memory for a row of 2^31 numbers is told its price, too."""
    monkeypatch.undo()  # what is not initialised takes no memory, unless a test fills it
    cpu = torch.device("cpu")
    reset_peak(cpu)
    before = peak_bytes(cpu)
    calls = report(capsys, "--hidden-size", str(2**28), "--device", "cpu")["calls"]
    assert calls[0]["gradient_bytes"] > 2 * 2**28 * 8192
    assert peak_bytes(cpu) - before < 2 * 2**28
