"""The mass of everything but the candidates: value and gradient against the oracle, far below what 1 - p has of it."""

import pytest
import torch

import logitless as ll
from logitless.errors import OptionError
from tests.support.vocab.comparing import compare, operands

BUDGETS = [None, 3000]  # the second cuts tokens and vocabulary
BESIDE = ("tail_logprob", "logprob", "entropy", "rank", "kl")


def problem(**options):
    """Ids that are named twice, and labels among them in every other token."""
    ops = operands((13,), 7, 31, reference=True, ranks=(2,), **options)
    ids = torch.randint(options.get("vocab_size", 31), (13, 4))
    ids[:, 3] = ids[:, 1]
    ids[::2, 2] = ops.labels[::2]
    ops.labels[3] = -100
    return ops, ids


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("want", [("tail_logprob",), BESIDE], ids=len)
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "scale": 1.3}, {"vocab_size": 19}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient(dtype, options, want, budget):
    ops, ids = problem(dtype=dtype, **options)
    compare(ops, want, candidates=ids, memory_budget=budget, top_k=2, temperature=0.8)


@pytest.mark.parametrize("trainable", [("hidden",), ("weight",), ("bias",), ("a", "b"), ()], ids=str)
@pytest.mark.parametrize("budget", BUDGETS)
def test_whatever_is_frozen_and_without_labels(budget, trainable):
    ops, ids = problem()
    ops = ops.training(*trainable)
    ops.labels = None
    compare(ops, ("tail_logprob", "entropy"), candidates=ids, memory_budget=budget)


@pytest.mark.parametrize("margin", [20.0, 80.0, 400.0])
def test_a_tail_far_below_the_smallest_number(margin):
    """fp32 has no e^-400, and its logarithm all the same; so has the gradient."""
    weight, bias = torch.randn(31, 7), torch.zeros(31)
    bias[[2, 30]] = margin
    ops, ids = operands((5,), 7, 31, dtype=torch.float32), torch.tensor([[30, 2, 7]]).expand(5, 3)
    ops.weight, ops.bias = weight.requires_grad_(), bias.requires_grad_()
    compare(ops, ("tail_logprob",), candidates=ids, tolerance=max(2e-6, 1e-7 * margin))  # the digits of such a logit


def test_nothing_but_the_candidates():
    ops = operands((4,), 7, 5, dtype=torch.float32)
    ids = torch.arange(5).expand(4, 5)
    stats = ll.token_stats(ops.hidden, ops.head, want=("tail_logprob",), candidates=ids)
    assert stats.tail_logprob.isneginf().all()
    (gradient,) = torch.autograd.grad(torch.where(stats.tail_logprob > -1e9, stats.tail_logprob, 0).sum(), ops.hidden)
    assert gradient.eq(0).all()


@pytest.mark.parametrize("trainable", [("hidden", "weight", "bias", "a", "b"), ("hidden",)], ids=len)
@pytest.mark.parametrize("budget", [None, 1])
def test_a_tail_of_nothing_is_a_constant(budget, trainable):
    """Beside a token with a tail, tokens whose candidates are the whole vocabulary: no entry has a gradient."""
    ids = torch.tensor([[0, 1], [1, 1], [1, 0]])
    ops = operands((3,), 5, 2, ranks=(2,)).training(*trainable)
    compare(ops, ("tail_logprob", "logsumexp"), candidates=ids, memory_budget=budget)


def test_what_it_needs():
    ops, ids = problem()
    with pytest.raises(OptionError, match="tail_logprob is of everything but the candidates; pass candidates=ids"):
        ll.token_stats(ops.hidden, ops.head, want=("tail_logprob",))
    with pytest.raises(OptionError, match="tail_logprob is for backend 'eager', got 'triton'; leave backend out"):
        ll.token_stats(ops.hidden, ops.head, want=("tail_logprob",), candidates=ids, backend="triton")
