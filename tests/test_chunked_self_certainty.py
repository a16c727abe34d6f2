"""chunked_self_certainty: exact whatever the chunks, where averaging their log-sum-exps is not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import logitless as ll
from logitless import logits as module
from logitless.errors import DtypeError, GradientError, OptionError, ShapeError
from tests.support.allocations import trace_allocations


def dense(logits):
    z = logits.double()
    return z.logsumexp(-1) - z.mean(-1) - math.log(z.shape[-1])


def averaged(logits, chunk_size):
    """The widely copied report's function: each chunk's log-sum-exp minus its mean, averaged over the chunks."""
    chunks = logits.split(chunk_size, -1)
    return torch.stack([c.logsumexp(-1) - c.mean(-1) for c in chunks], -1).mean(-1)


@settings(max_examples=40)
@given(st.integers(1, 23), st.integers(1, 30), st.sampled_from([0.0, 1.0, 30.0, 300.0]))
def test_equals_the_dense_formula_whatever_the_chunks(vocab, chunk_size, spread):
    logits = spread * torch.randn(3, 2, vocab, dtype=torch.float64)
    torch.testing.assert_close(ll.chunked_self_certainty(logits, chunk_size), dense(logits), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_logits_are_summed_in_float32(dtype):
    logits = (5 * torch.randn(4, 9, 1000)).to(dtype)
    got = ll.chunked_self_certainty(logits, 77)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), dense(logits), rtol=1e-5, atol=1e-6)


def test_nearly_equal_logits():
    """Of which rounding alone would make a third negative."""
    assert (ll.chunked_self_certainty(torch.randn(64, 32) @ (1e-4 * torch.randn(32, 2_000))) >= 0).all()


def test_one_row_and_the_default_chunk():
    logits = torch.randn(1000)
    torch.testing.assert_close(ll.chunked_self_certainty(logits).double(), dense(logits), rtol=1e-5, atol=1e-6)
    assert ll.chunked_self_certainty(torch.zeros(7, 5)).abs().max() < 1e-6
    assert ll.chunked_self_certainty(torch.randn(0, 5)).shape == (0,)
    logits = torch.randn(41, dtype=torch.float64, requires_grad=True)
    got, wanted = (torch.autograd.grad(f(logits), logits) for f in (ll.chunked_self_certainty, dense))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_entries_without_probability():
    """A row with an impossible entry is infinitely far from uniform; a slice of such entries poisons nothing else."""
    logits = torch.randn(2, 12, dtype=torch.float64)
    logits[1, 4:8] = -math.inf
    got = ll.chunked_self_certainty(logits, 4)
    assert got[0] == pytest.approx(float(dense(logits)[0]))
    assert got[1] == math.inf
    assert ll.chunked_self_certainty(logits.flip(-1), 4)[1] == math.inf


def test_its_gradient_is_softmax_minus_uniform(monkeypatch):
    monkeypatch.setitem(module.TILE_BYTES, "cpu", 8 * 3 * 41)  # several tiles, the last one ragged
    logits = (3 * torch.randn(2, 5, 41, dtype=torch.float64)).requires_grad_()
    cotangent = torch.randn(2, 5, dtype=torch.float64)
    (got,) = torch.autograd.grad(ll.chunked_self_certainty(logits, 7), logits, cotangent)
    (wanted,) = torch.autograd.grad(dense(logits), logits, cotangent)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_averaged_log_sum_exps_are_too_small_by_log_k_and_a_gap():
    """Jensen: log Σ_k e^(lse_k) >= log K + mean_k lse_k, with equality only where all chunks weigh the same."""
    logits = 4 * torch.randn(200, 64, dtype=torch.float64)
    chunks = 8
    short = dense(logits) + math.log(64) - averaged(logits, 64 // chunks)
    gap = short - math.log(chunks)
    assert gap.min() > 0
    assert gap.std() > 0.3  # it depends on the row: no constant repairs it
    alike = logits[:, :8].repeat(1, chunks)
    assert dense(alike) + math.log(64) - averaged(alike, 8) == pytest.approx(math.log(chunks) * torch.ones(200))


def test_averaged_log_sum_exps_reorder_completions():
    """Mean self-certainty of completions: the average of chunks puts many pairs in the wrong order."""
    completions = torch.rand(60, 1, 1).add(2.5) * torch.randn(60, 8, 512, dtype=torch.float64)
    right = ll.chunked_self_certainty(completions, 16).mean(-1)
    wrong = averaged(completions, 16).mean(-1)
    torch.testing.assert_close(right, dense(completions).mean(-1))
    first, second = torch.combinations(torch.arange(60)).T
    inverted = ((right[first] > right[second]) != (wrong[first] > wrong[second])).double().mean()
    assert inverted > 0.05


@pytest.mark.parametrize("chunk_size", [256, None])
def test_memory_is_two_chunks_and_numbers_per_row(chunk_size, monkeypatch):
    logits = torch.randn(64, 8192)
    rows = 64 * 4
    monkeypatch.setattr(module, "SMALL_BYTES", 2 * 256 * rows)  # what two chunks of no given size fit
    seen = trace_allocations(lambda: ll.chunked_self_certainty(logits, chunk_size))
    assert seen.largest == 256 * rows
    assert seen.peak <= (2 * 256 + 24) * rows


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # as Dynamo does
def test_a_graph_for_every_number_of_rows():
    compiled = torch.compile(ll.chunked_self_certainty, fullgraph=True, dynamic=True, backend="eager")
    for rows, chunk_size in ((2, None), (3, None), (5, 4), (5, 7)):
        logits = torch.randn(rows, 9)
        torch.testing.assert_close(compiled(logits, chunk_size), ll.chunked_self_certainty(logits, chunk_size))


@pytest.mark.parametrize(
    ("logits", "chunk_size", "error", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), None, DtypeError, "logits must .*, got torch.int64"),
        ([[0.0, 1.0]], None, DtypeError, "logits must be a tensor of torch.float32 or .*, got list"),
        (None, None, DtypeError, "logits must be a tensor of torch.float32 or .*, got NoneType"),
        (torch.zeros(()), None, ShapeError, r"logits must be \(..., V\)"),
        (torch.zeros(3, 0), None, ShapeError, r"at least one entry, got shape \(3, 0\)"),
        (torch.zeros(3, 4), 0, OptionError, "chunk_size: expected a whole number of at least 1, got 0"),
        (torch.zeros(3, 4), True, OptionError, "got True"),
        (torch.zeros(3, 4), 1.5, OptionError, "got 1.5"),
    ],
)
def test_what_it_cannot_take(logits, chunk_size, error, message):
    with pytest.raises(error, match=message):
        ll.chunked_self_certainty(logits, chunk_size)


def test_a_second_derivative_is_refused():
    logits = torch.randn(2, 9, requires_grad=True)
    with pytest.raises(GradientError, match="no second derivative"):
        torch.autograd.grad(ll.chunked_self_certainty(logits, 4).sum(), logits, create_graph=True)
