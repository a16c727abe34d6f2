"""Values whose logits no memory holds, added up in registers: held to float64, and to the slices that they replace."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless.vocab.backends import logits
from logitless.vocab.backends.compiled import stream
from logitless.vocab.call import compiled_support
from logitless.vocab.head.low_rank import LowRank
from tests.support.allocations import trace_allocations
from tests.support.switches import put_back
from tests.support.vocab.comparing import compare, operands

REASON = compiled_support.why_not("cpu")
PROCESSOR = torch.backends.cpu.get_cpu_capability()
if REASON is None and PROCESSOR not in stream.FLAGS:
    REASON = f"it is written for {' and '.join(stream.FLAGS)}, got {PROCESSOR}"
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
WANT = ("logprob", "logsumexp", "label_logit", "entropy", "self_certainty", "mean_logit", "rank")


@pytest.fixture(autouse=True)
def streamed(monkeypatch):
    """Any processor, and any number of tokens; how many chunks were accumulated so."""
    chunks = []
    accumulate = stream.accumulate
    monkeypatch.setattr(stream, "is_intel", lambda: False)
    monkeypatch.setattr(logits, "has_bf16_tiles", lambda x: False)
    monkeypatch.setattr(stream, "FEW", 1)
    monkeypatch.setattr(stream, "accumulate", lambda chunk: chunks.append(chunk.n_tokens) or accumulate(chunk))
    return chunks


def problem(n=13, h=8, v=257, **more):
    return operands((n,), h, v, dtype=torch.float32, bias=False, **more).training()


def values(ops, want=WANT, **options):
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, backend="compiled", **options)
    return {name: getattr(stats, name) for name in want}


SIZES = [(1, 1, 1), (5, 3, 12), (13, 8, 257), (33, 65, 1031), (70, 517, 96), (100, 129, 97), (40, 1030, 2500)]


@pytest.mark.parametrize(("n", "h", "v"), SIZES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_size_is_the_oracle(n, h, v, threads, streamed):
    with put_back():
        torch.set_num_threads(threads)
        compare(problem(n, h, v), WANT, backend="compiled")
    assert streamed == [n]


@pytest.mark.parametrize("more", [{"scale": 0.3}, {"vocab_size": 250}], ids=str)
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.3, 3.0, 13)], ids=["number", "tensor"])
def test_scale_temperature_and_padding(more, temperature, streamed):
    compare(problem(**more), WANT, backend="compiled", temperature=temperature)
    assert streamed == [13]


@pytest.mark.parametrize(("budget", "chunks"), [(600_000, 1), (90_000, 2), (9_000, 0)])
def test_a_budget_makes_chunks_and_a_small_one_makes_slices(budget, chunks, streamed):
    with put_back():
        torch.set_num_threads(1)  # each has rows of the weight
        ops = problem(150, 33, 1031)
        ops.labels[[2, 149]] = -100
        compare(ops, WANT, backend="compiled", memory_budget=budget)
        assert (len(streamed), sum(streamed)) == (chunks, 148 if chunks else 0)
        told = ll.explain(ops.hidden, ops.head, ops.labels, want=WANT, backend="compiled", memory_budget=budget)
        assert told.buffer_bytes <= budget


def test_without_labels(streamed):
    ops = dataclasses.replace(problem(), labels=None)
    compare(ops, ("logsumexp", "entropy"), backend="compiled")
    assert streamed == [13]


def test_bf16_rows_are_read_as_they_are(streamed):
    ops = problem(20, 40, 1031)
    narrow = dataclasses.replace(ops, weight=ops.weight.bfloat16())
    wide = dataclasses.replace(ops, weight=narrow.weight.float())
    for hidden in (ops.hidden, ops.hidden.bfloat16()):
        for name, x in values(dataclasses.replace(narrow, hidden=hidden)).items():
            expected = values(dataclasses.replace(wide, hidden=hidden.float()))[name]
            assert torch.equal(x, expected), name
    assert set(streamed) == {20}


def test_the_same_bits_for_any_number_of_threads_and_any_batch(streamed):
    ops = problem(70, 40, 3000)
    with put_back():
        torch.set_num_threads(1)
        alone = values(ops)
        for threads in (2, 5, 19):
            torch.set_num_threads(threads)
            for name, x in values(ops).items():
                assert torch.equal(x, alone[name]), (threads, name)
        some = dataclasses.replace(ops, hidden=ops.hidden[9:12], labels=ops.labels[9:12])
        for name, x in values(some, ("logsumexp", "entropy")).items():
            assert torch.equal(x, alone[name][9:12]), name


@pytest.mark.parametrize("sure", [20.0, 80.0, 1e4, 1e6])
def test_extreme_logits_are_as_near_to_float64_as_slices_have_them(sure, streamed):
    """Labels far above all others, or far below; many of equal logits."""
    ops = problem(6, 8, 700)
    ops.weight[:, 0] = 0.0
    ops.weight[[0, 300, 699], 0] = 1.0
    ops.hidden[:, 0] = sure
    ops.hidden[5] = 0.0
    ops.labels = torch.tensor([0, 300, 699, 5, 6, 698])
    want = ("logprob", "logsumexp", "entropy")
    exact = ops.to(torch.float64)
    expected = ll.token_stats(exact.hidden, exact.head, ops.labels, want=want, backend="eager")
    sliced = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, backend="eager")
    for name, x in values(ops, want).items():
        right = getattr(expected, name)
        rounded = (getattr(sliced, name).double() - right).abs()
        assert ((x.double() - right).abs() <= 2 * rounded + 2e-6 * (1 + right.abs())).all(), name
    assert streamed == [6]


@pytest.mark.parametrize("sure", [10.0, 30.0, 80.0])
def test_a_sure_token_keeps_the_digits_of_what_the_others_weigh(sure, streamed):
    ops = problem(6, 8, 700)
    ops.weight[:, 0] = 0.0
    ops.weight[0, 0] = 1.0
    ops.hidden[:, 0] = sure
    ops.labels[:] = 0
    exact = ops.to(torch.float64)
    expected = ll.token_stats(exact.hidden, exact.head, ops.labels, backend="eager").logprob
    assert (expected > -0.1).any()
    torch.testing.assert_close(values(ops, ("logprob",))["logprob"].double(), expected, rtol=1e-4, atol=1e-37)
    assert streamed == [6]


def test_nan_and_infinity_are_seen_and_stay_with_their_token(streamed):
    ops = problem(20, 8, 300)
    clean = values(ops)
    ops.hidden[3, 2], ops.hidden[17, 0] = torch.nan, torch.inf
    for name, x in values(ops).items():
        others = torch.tensor([i not in (3, 17) for i in range(20)])
        assert torch.equal(x[others], clean[name][others]), name
        if name in ("logprob", "logsumexp", "entropy"):
            assert x[[3, 17]].isnan().all(), name


def test_no_slice_of_logits_exists(streamed):
    ops = problem(200, 16, 30_000)
    seen = trace_allocations(lambda: values(ops, ("logprob", "entropy")))
    assert streamed == []  # a watched call makes slices, which are seen
    told = ll.explain(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), backend="compiled")
    assert told.slices.in_products
    assert "whose logits no memory holds" in str(told)
    assert told.buffer_bytes < 200 * 30_000 * 4 / 50 < seen.peak


@pytest.mark.parametrize("also", ["bias", "softcap", "adapter", "top_k", "reference", "float64", "flop", "transposed"])
def test_what_it_does_not_do_is_done_by_slices(also, streamed):
    ops, want, options = problem(), ("logprob", "entropy"), {}
    if also == "bias":
        ops = operands((13,), 8, 257, dtype=torch.float32).training()
    elif also == "softcap":
        ops = problem(softcap=5.0)
    elif also == "adapter":
        ops.adapters = (LowRank(torch.randn(2, 8), torch.randn(257, 2)),)
    elif also == "top_k":
        options["top_k"] = 3
    elif also == "reference":
        ops, want = problem(reference=True), ("logprob", "kl")
    elif also == "float64":
        ops = ops.to(torch.float64)
    elif also == "transposed":
        ops.weight = ops.weight.t().contiguous().t()
    if also == "flop":
        with FlopCounterMode(display=False) as counted:
            values(ops)
        assert counted.get_total_flops() >= 2 * 13 * 8 * 257
    else:
        compare(ops, want, backend="compiled", **options)
    assert streamed == []


def test_gradients_are_those_of_slices(streamed):
    compare(problem().training("hidden", "weight"), ("logprob", "entropy"), backend="compiled")
    assert streamed == []


def test_without_a_library_slices_are_made(monkeypatch, streamed):
    monkeypatch.setattr(stream, "_compiled", lambda command: (_ for _ in ()).throw(OSError("no room")))
    stream._library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="could not compile a product.*no room"):
            compare(problem(), ("logprob", "entropy"), backend="compiled")
        compare(problem(), ("logprob", "entropy"), backend="compiled")  # said once
    finally:
        stream._library.cache_clear()
    assert streamed == []


def test_another_process_loads_what_this_one_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    program = "from logitless.vocab.backends.compiled import stream; print(stream.library().parts())"
    for compiler in ("g++", "g++"):
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "16", compiler
    (made,) = (tmp_path / "logitless").iterdir()
    assert made.suffix == ".so"


def test_both_kinds_of_vectors_give_the_same_bits(tmp_path, monkeypatch, streamed):
    """AVX2's, on a processor that has AVX512's, too."""
    ops = problem(50, 40, 1031)
    found = {}
    for kind in ("AVX2", PROCESSOR):
        made = stream._library("g++", kind)
        monkeypatch.setattr(stream, "library", lambda made=made: made)
        found[kind] = values(ops)
    for name, x in found["AVX2"].items():
        assert torch.equal(x, found[PROCESSOR][name]), name
