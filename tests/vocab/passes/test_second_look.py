"""Statistics that look twice: at slices that stayed or at products made again, and how exact they are at the ends."""

import math

import pytest
import torch

import logitless as ll
from logitless.algebra.costs import looking_again_is_cheaper
from logitless.algebra.stats import STATISTICS
from logitless.vocab.reference import dense_logits, dense_token_stats
from tests.support.vocab.comparing import Operands, assert_near_in_norm, compare, operands
from tests.support.vocab.measuring import measure, not_interpreted

TWICE = tuple(name for name, row in STATISTICS.items() if row.looks == 2)
PAIR = ("acceptance", "total_variation")
SIDES = ("kl_mixture", "reverse_kl_mixture")
MIB = 1 << 20


def test_the_table_says_which_look_twice():
    assert ("jsd", *SIDES, *PAIR) == TWICE


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("transform", [{}, {"softcap": 4.0, "scale": 0.5, "vocab_size": 3997, "ranks": (2,)}], ids=str)
@pytest.mark.parametrize("budget", [None, 100_000], ids=["stay", "again"])
def test_equals_the_oracle_whether_slices_stay_or_not(budget, transform, labels, backend):
    ops = operands((9,), 6, 4001, reference=True, **transform)
    want = TWICE if not labels else ("logprob", "kl", *TWICE)
    ops.labels = ops.labels if labels else None
    temperature = torch.rand(9, dtype=torch.float64) + 0.5
    told = ll.explain(
        ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, memory_budget=budget, backend=backend
    )
    assert told.price.looks_again == (budget is not None)
    compare(ops, want, jsd_beta=0.3, memory_budget=budget, temperature=temperature, backend=backend)


def test_explain_says_how_it_looks_again():
    ops = operands((40,), 8, 6000, dtype=torch.float32, reference=True)
    line = {
        budget: str(ll.explain(ops.hidden, ops.head, want=PAIR, reference=ops.reference, memory_budget=budget))
        for budget in (None, 200_000)
    }
    assert "entries, looked at twice" in line[None]
    assert line[None].startswith("6 GEMMs")
    assert "a second look at them by products of its own" in line[200_000]
    assert line[200_000].startswith("8 GEMMs")
    once = str(ll.explain(ops.hidden, ops.head, want=("kl",), reference=ops.reference))
    assert "look" not in once.split("dense")[0]


def test_which_is_cheaper():
    assert not looking_again_is_cheaper(kept=64, streamed=2048, device="cpu")
    assert looking_again_is_cheaper(kept=4, streamed=2048, device="cpu")
    assert not looking_again_is_cheaper(kept=4, streamed=4, device="cpu")  # a call of few tokens
    assert looking_again_is_cheaper(kept=64, streamed=4096, device="cuda")


def near(step: float, dtype: torch.dtype = torch.float32) -> Operands:
    """A policy whose logits are `step` away from its reference's."""
    ops = operands((6,), 8, 501, dtype=dtype, reference=True, bias=False)
    assert ops.ref is not None
    ops.ref.weight = ops.weight.detach().clone()
    ops.ref.hidden = ops.hidden.detach() + step * torch.randn(6, 8, dtype=dtype)
    return ops


@pytest.mark.parametrize("step", [1e-5, 1e-3, 0.1])
def test_total_variation_keeps_its_digits_near_zero(step, backend):
    ops = near(step)
    exact = ops.to(torch.float64)
    assert exact.reference is not None
    logits = dense_logits(exact.hidden, exact.head), dense_logits(*exact.reference)
    p, q = (z.softmax(-1) for z in logits)
    truth = (p - q).abs().sum(-1) / 2
    stats = ll.token_stats(ops.hidden, ops.head, want=PAIR, reference=ops.reference, backend=backend)
    error = (stats.total_variation - truth).abs() / truth
    assert error.max() < 2e-6 / step + 2e-6  # the logits' own rounding
    torch.testing.assert_close(stats.acceptance.double(), 1 - truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("step", [1e-3, 3e-2, 1.0])
def test_each_side_of_a_mixture_keeps_its_digits_near_zero(step, beta, backend):
    """Of terms of first order in log p - log q, whose sum is of second, rounding would leave 1e-7."""
    ops = near(step)
    exact = ops.to(torch.float64)
    expected = dense_token_stats(exact.hidden, exact.head, want=SIDES, reference=exact.reference, jsd_beta=beta)
    stats = ll.token_stats(ops.hidden, ops.head, want=SIDES, reference=ops.reference, jsd_beta=beta, backend=backend)
    for name in SIDES:
        value = getattr(stats, name)
        torch.testing.assert_close(value.double(), expected[name], rtol=4e-6 / step + 2e-5, atol=0)
        (grad,) = torch.autograd.grad(value.sum(), ops.hidden, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected[name].sum(), exact.hidden, retain_graph=True)
        assert_near_in_norm(grad, wanted, 4e-6 / step + 2e-5)


def of_few_bits(x: torch.Tensor, after_the_point: int) -> torch.Tensor:
    return (x.detach() * 2**after_the_point).round() / 2**after_the_point


@pytest.mark.parametrize("sure", [False, True])
def test_digits_near_zero_where_logits_have_no_rounding(sure, backend):
    """Two heads of few bits: what is off is the divergences' own arithmetic, and not the products'."""
    ops = operands((6,), 16, 2000, dtype=torch.float32)
    with torch.no_grad():
        ops.hidden.copy_(of_few_bits(torch.randn(6, 16), 3))
        ops.weight.copy_(of_few_bits(torch.randn(2000, 16), 14))
        ops.bias.zero_()[77] = 40.0 * sure
    weight = ops.weight + of_few_bits(torch.randn(2000, 16) / 1000, 14)
    ops.ref = Operands(*(x.detach().clone() for x in (ops.hidden, weight, ops.bias)), None)
    exact = ops.to(torch.float64)
    want = ("jsd", *SIDES, "total_variation")
    got = ll.token_stats(ops.hidden, ops.head, want=want, reference=ops.reference, backend=backend)
    expected = dense_token_stats(exact.hidden, exact.head, want=want, reference=exact.reference)
    for name in want:
        value = getattr(got, name)
        # a sure token's are of what it leaves of 1, and next to nothing
        torch.testing.assert_close(value.double(), expected[name], rtol=2e-3, atol=1e-13 * sure)
        (grad,) = torch.autograd.grad(value.sum(), ops.weight, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected[name].sum(), exact.weight, retain_graph=True)
        assert_near_in_norm(grad, wanted, 1e-3 if sure else 1e-5, name, floor=0)


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_sides_of_a_mixture_of_far_policies(beta, backend):
    """Each sure of an entry that the other finds impossible: what a mixture bounds, and no gradient to speak of."""
    eye = torch.eye(4) * 120
    hidden, other = torch.eye(4)[[0]].requires_grad_(), torch.eye(4)[[1]]
    stats = ll.token_stats(
        hidden, ll.LMHead(eye), want=SIDES, reference=(other, ll.LMHead(eye)), jsd_beta=beta, backend=backend
    )
    assert stats.kl_mixture.item() == pytest.approx(-math.log(1 - beta), rel=1e-6)
    assert stats.reverse_kl_mixture.item() == pytest.approx(-math.log(beta), rel=1e-6)
    (grad,) = torch.autograd.grad(stats.kl_mixture.sum() + stats.reverse_kl_mixture.sum(), hidden)
    assert grad.abs().max() < 1e-3


def test_total_variation_of_sure_policies(backend):
    """Both sure of one entry, so that all that is different is what they leave of 1: 1 - acceptance would be 0."""
    hidden, other, head = torch.eye(4)[[0]], 1.05 * torch.eye(4)[[0]], ll.LMHead(20 * torch.eye(4))
    stats = ll.token_stats(hidden, head, want=PAIR, reference=(other, head), backend=backend)
    p, q = (dense_logits(x, head).softmax(-1) for x in (hidden, other))
    torch.testing.assert_close(stats.total_variation.double(), (p - q).abs().sum(-1) / 2, rtol=1e-5, atol=0)
    assert 0 < stats.total_variation.item() < 1e-8


def test_equal_policies_are_at_zero_without_gradient(backend):
    ops = near(0.0)
    stats = ll.token_stats(ops.hidden, ops.head, want=PAIR, reference=ops.reference, backend=backend)
    assert (stats.total_variation == 0).all()
    torch.testing.assert_close(stats.acceptance, torch.ones(6), rtol=0, atol=1e-6)
    for total in (stats.total_variation.sum(), stats.acceptance.sum()):
        (grad,) = torch.autograd.grad(total, ops.hidden, retain_graph=True)
        assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("want", PAIR)
def test_signs_of_policies_that_are_equal_to_rounding_are_those_of_the_sums(want, loss, labels, backend):
    """Which of two is ahead is rounding alone, but the same in both passes: a gradient of probabilities sums to 0."""
    ops = operands((4,), 6, 50, dtype=torch.float32, spread=8.0)
    turned = (x.detach().flip(1).contiguous() for x in (ops.hidden, ops.weight))  # whose products add up otherwise
    ops.ref = Operands(*turned, ops.bias.detach().clone(), None)
    options = {"want": (want,), "reference": ops.reference, "backend": backend}
    given = ops.hidden, ops.head, ops.labels if labels else None
    if loss:
        total = ll.token_loss(lambda stats: getattr(stats, want), *given, reduction="sum", **options)
    else:
        total = getattr(ll.token_stats(*given, **options), want).sum()
    (grad,) = torch.autograd.grad(total, ops.bias)
    assert grad.abs().sum() > 1e-3
    assert abs(float(grad.sum())) < 1e-6


def test_far_policies(backend):
    """Each sure of an entry that the other finds impossible: the overlap keeps its digits, nothing is NaN."""
    eye = torch.eye(4) * 80
    hidden, other = torch.eye(4)[[0]].requires_grad_(), torch.eye(4)[[1]]
    stats = ll.token_stats(hidden, ll.LMHead(eye), want=PAIR, reference=(other, ll.LMHead(eye)), backend=backend)
    torch.testing.assert_close(stats.acceptance, torch.tensor([4.0]) * torch.tensor(-80.0).exp(), rtol=1e-5, atol=0)
    assert stats.total_variation.item() == 1
    (grad,) = torch.autograd.grad(stats.acceptance.log().sum(), hidden)
    assert grad.isfinite().all()
    z = (hidden.detach().double() @ eye.double()).requires_grad_()
    p, q = z.softmax(-1), (other.double() @ eye.double()).softmax(-1)
    (dz,) = torch.autograd.grad(torch.minimum(p, q).sum().log().sum(), z)
    assert_near_in_norm(grad, dz @ eye.double(), 1e-4)


def test_a_diverged_model_is_seen(backend):
    ops = near(0.1)
    ops.hidden.data[0, 0] = torch.nan
    with torch.no_grad():
        stats = ll.token_stats(ops.hidden, ops.head, want=PAIR, reference=ops.reference, backend=backend)
    assert stats.acceptance[0].isnan()
    assert stats.total_variation[0].isnan()
    assert stats.acceptance[1:].isfinite().all()


@not_interpreted
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("budget", [MIB, 4 * MIB])
def test_memory_keeps_to_the_budget(budget, trained, backend):
    n, v = 96, 16_384
    ops = operands((n,), 16, v, dtype=torch.float32, reference=True, bias=False)
    ops = ops.training("hidden", "weight") if trained else ops.training()

    def step():
        stats = ll.token_stats(
            ops.hidden, ops.head, want=PAIR, reference=ops.reference, memory_budget=budget, backend=backend
        )
        if trained:
            torch.autograd.grad(stats.acceptance.sum(), [ops.hidden, ops.weight])

    told = ll.explain(ops.hidden, ops.head, want=PAIR, reference=ops.reference, memory_budget=budget, backend=backend)
    assert told.buffer_bytes <= budget
    small = n * 4 * 40 + v * 4  # numbers of tokens
    assert measure(step, memory=True).peak < told.buffer_bytes + told.gradient_bytes + small
    assert n * v * 4 > 5 * MIB
