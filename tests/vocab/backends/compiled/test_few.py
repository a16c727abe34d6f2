"""A few tokens of a bf16 head on a processor that multiplies tiles: exact products, and no copy of the head in fp32."""

import warnings

import pytest
import torch

import logitless as ll
from logitless.vocab.backends.compiled import few
from logitless.vocab.noise import Noise
from logitless.vocab.reference import dense_token_stats
from tests.support.switches import put_back
from tests.support.vocab.comparing import assert_near, operands
from tests.support.vocab.processors import multiply_by, needs_library, needs_pairs

pytestmark = [needs_library, needs_pairs]
WANT = ("logprob", "entropy", "rank")
EACH = torch.linspace(0.3, 3.0, 32)


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """How many tokens each product of a few had, of a head of any size."""
    multiply_by("tiles", monkeypatch)
    monkeypatch.setattr(few, "WORTH", 1)
    found, usual = [], few.product_of_few
    monkeypatch.setattr(
        few, "product_of_few", lambda tokens, *given: found.append(len(tokens)) or usual(tokens, *given)
    )
    return found


def problem(n, h, v, bias=False, **more):
    return operands((n,), h, v, dtype=torch.bfloat16, bias=bias, **more).training()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("n", "h", "v"), [(1, 1, 1), (1, 65, 4099), (5, 33, 193), (32, 130, 1031)], ids=str)
def test_every_size_is_the_oracle(n, h, v, threads, products):
    ops = problem(n, h, v)
    with put_back():
        torch.set_num_threads(threads)
        found = ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, backend="eager")
    exact = ops.to(torch.float64)
    right = dense_token_stats(exact.hidden, exact.head, ops.labels, want=WANT)
    for name in WANT:
        assert_near(getattr(found, name), right[name].double(), 2e-5, name)
    assert set(products) == {n}


@pytest.mark.parametrize("temperature", [0.7, EACH], ids=["0.7", "tensor"])
@pytest.mark.parametrize(
    "more", [{}, {"bias": True}, {"softcap": 3.0}, {"ranks": (4,)}, {"vocab_size": 1020, "scale": 0.8}], ids=str
)
def test_every_head_is_the_oracle(more, temperature, products):
    ops = problem(32, 37, 1031, **more)
    found = ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, temperature=temperature, backend="eager")
    exact = ops.to(torch.float64)
    right = dense_token_stats(exact.hidden, exact.head, ops.labels, want=WANT, temperature=temperature)
    for name in WANT:
        assert_near(getattr(found, name), right[name].double(), 2e-5, name)
    assert set(products) == {32}


@pytest.mark.parametrize("n", [1, 2, 31, 32])
def test_a_second_look_reads_logits_in_columns(n, products):
    ops, want = problem(n, 37, 4099, reference=True), ("jsd", "kl", "rank")
    found = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, backend="eager")
    exact = ops.to(torch.float64)
    right = dense_token_stats(exact.hidden, exact.head, ops.labels, want=want, reference=exact.reference)
    for name in want:
        assert_near(getattr(found, name), right[name].double(), 2e-5, name)
    assert products


def test_rows_that_lie_apart_beside_nan(products):
    ops = problem(3, 31, 500)
    wide = torch.full((500, 40), torch.nan, dtype=torch.bfloat16)
    wide[:, 3:34] = ops.weight
    found, right = (
        ll.token_stats(ops.hidden, ll.LMHead(w), ops.labels, want=WANT, backend="eager")
        for w in (wide[:, 3:34], ops.weight)
    )
    assert torch.equal(found.logprob, right.logprob)
    assert products


def test_draws_are_those_of_fp32(products):
    """Of a head whose logits differ by more than rounding."""
    ops = problem(4, 64, 3001)
    wide = ll.LMHead(ops.weight.float())
    noise = Noise(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    found = ll.sample_tokens(ops.hidden, ops.head, temperature=0.9, top_p=0.9, noise=noise)
    assert products
    right = ll.sample_tokens(ops.hidden.float(), wide, temperature=0.9, top_p=0.9, noise=noise)
    assert torch.equal(found.token, right.token)


def test_a_slice_is_as_long_as_of_an_fp32_head():
    """No copy limits it to what the caches hold."""
    ops = problem(2, 100, 40_000)
    wide = ll.explain(ops.hidden.float(), ll.LMHead(ops.weight.float()), want=("logsumexp",)).slices
    assert ll.explain(ops.hidden, ops.head, want=("logsumexp",)).slices.width == wide.width == 40_000


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((33, 24, 1031, torch.bfloat16), "more tokens"),
        ((4, 24, 1031, torch.float32), "fp32"),
    ],
    ids=str,
)
def test_others_keep_their_product(given, why, products):
    n, h, v, dtype = given
    ops = operands((n,), h, v, dtype=dtype, bias=False).training()
    ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, backend="eager")
    assert not products, why


def test_a_small_budget_has_no_room_for_a_threads_rows(products):
    ops = problem(2, 512, 1031)
    for budget, taken in ((300_000, False), (100_000_000, True)):
        told = ll.explain(ops.hidden, ops.head, want=("logsumexp",), memory_budget=budget)
        assert told.buffer_bytes <= budget
        assert told.slices.unconverted == taken
        ll.token_stats(ops.hidden, ops.head, want=("logsumexp",), memory_budget=budget)
        assert bool(products) == taken


def test_without_a_compiler_nothing_is_said(products, monkeypatch):
    monkeypatch.setattr(few.library, "is_made", lambda: False)
    monkeypatch.setattr(few, "why_not", lambda device: "no compiler")
    monkeypatch.setattr(few, "_can_be_had", few._can_be_had.__wrapped__)
    ops = problem(2, 24, 1031)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, backend="eager")
    assert not products


def test_small_heads_compile_nothing(products, monkeypatch):
    monkeypatch.setattr(few, "WORTH", 1 << 24)
    ops = problem(2, 24, 1031)
    ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, backend="eager")
    assert not products
