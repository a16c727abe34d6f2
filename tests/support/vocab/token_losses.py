"""Holding `token_loss` against the same function of the oracle's numbers."""

from types import SimpleNamespace

import torch

import logitless as ll
from logitless.vocab.reference import dense_token_stats
from tests.support.vocab.comparing import TOLERANCE, assert_near, assert_near_in_norm, operands

REDUCTIONS = ["mean", "sum", "none"]
CHUNK = 3 * 8 * 3 * 23  # bytes: whole rows of 23 float64 entries for some of the tokens, not for five
PPO_WANT = ("logprob", "entropy")


def ppo(s, advantages, old):
    ratio = (s.logprob - old).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -clipped - 0.01 * s.entropy


def rollout(*lead: int, dtype=torch.float64, **kwargs):
    """Operands with ignored tokens, advantages and old log-probs that require grad."""
    ops = operands(lead or (7,), dtype=dtype, **kwargs)
    ops.labels.view(-1)[2] = ops.labels.view(-1)[5] = -100
    advantages = torch.randn(ops.labels.shape, dtype=dtype, requires_grad=True)
    old = (-3 + torch.randn(ops.labels.shape, dtype=dtype)).requires_grad_()
    return ops, (advantages, old)


def call(loss_fn, ops, inputs=(), **options):
    return ll.token_loss(loss_fn, ops.hidden, ops.head, ops.labels, inputs=inputs, reference=ops.reference, **options)


def dense_loss(loss_fn, ops, inputs=(), reduction="mean", per="token", **options):
    """The loss function once, on the oracle's numbers of the tokens that count, or of the sequences that do."""
    everything = torch.ones(ops.hidden.shape[:-1], dtype=torch.bool)
    keep = everything if ops.labels is None else ops.labels != options.get("ignore_index", -100)
    keep = keep.flatten(1).any(1) if per == "sequence" else keep
    stats = dense_token_stats(ops.hidden, ops.head, ops.labels, reference=ops.reference, **options)
    loss = loss_fn(SimpleNamespace(**{name: x[keep] for name, x in stats.items()}), *(x[keep] for x in inputs))
    if reduction == "none":
        return torch.zeros(keep.shape, dtype=loss.dtype).masked_scatter(keep, loss)
    return loss.sum() / (max(loss.numel(), 1) if reduction == "mean" else 1)


def leaves_of(ops, inputs):
    return [*ops.leaves.values(), *(x for x in inputs if x.requires_grad)]


def check(loss_fn, ops, inputs=(), *, tolerance=None, memory_budget=None, backend=None, **options):
    """Value and every gradient equal the oracle's, under a random upstream gradient."""
    tolerance = tolerance or TOLERANCE.get(ops.weight.dtype, 2e-5)
    exact = ops.to(torch.float64)
    exact_inputs = [x.detach().double().requires_grad_() if x.requires_grad else x for x in inputs]
    expected = dense_loss(loss_fn, exact, exact_inputs, **options)
    got = call(loss_fn, ops, tuple(inputs), memory_budget=memory_budget, backend=backend, **options)
    assert got.shape == expected.shape
    assert_near(got.detach(), expected.detach(), tolerance, "loss")
    up = torch.randn_like(expected)
    leaves = leaves_of(ops, inputs)
    found = torch.autograd.grad(got, leaves, up.to(got.dtype))
    wanted = torch.autograd.grad(expected, leaves_of(exact, exact_inputs), up)
    for i, (leaf, grad, want) in enumerate(zip(leaves, found, wanted, strict=True)):
        assert grad.dtype == leaf.dtype
        assert_near_in_norm(grad, want, 2 * tolerance, f"gradient {i}")


def grads(loss, ops, inputs=(), **kwargs):
    return torch.autograd.grad(loss, leaves_of(ops, inputs), **kwargs)


def assert_same(got, expected, tolerance=1e-12):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
