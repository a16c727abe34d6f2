"""`linear_cross_entropy` and `token_loss` against torch's own, their gradients too."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F

import logitless as ll
from bench.gpu.counts.claimed import claimed
from logitless.vocab.reference import dense_token_stats
from tests.support.plain import over
from tests.support.vocab.comparing import operands


@over("budget", [None, 20_000])
@over("options", {"plain": {}, "smoothing, z-loss": {"label_smoothing": 0.1, "z_loss": 1e-2}})
def test_cross_entropy(options, budget, device):
    ops = operands((11,), 7, 1031)
    ops.labels[3] = -100
    ops = ops.on(device)
    exact = ops.to(torch.float64)
    z = F.linear(exact.hidden, exact.weight, exact.bias)
    wanted = F.cross_entropy(z, ops.labels, label_smoothing=options.get("label_smoothing", 0.0))
    wanted = wanted + options.get("z_loss", 0.0) * z.logsumexp(-1)[ops.labels != -100].square().mean()
    options = {"memory_budget": budget, "backend": "triton", **options}
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, **options)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
    mine = torch.autograd.grad(loss, list(ops.leaves.values()))
    theirs = torch.autograd.grad(wanted, list(exact.leaves.values()))
    for m, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(m, t, rtol=1e-9, atol=1e-11)


@over("n", {"all ignored": 4, "none": 0})
def test_no_token_that_counts(n, device):
    """Sizes that are to fill a GPU's processors have none to go by: on a CPU a device is claimed for its number."""
    with claimed(home="cpu") if device == "cpu" else nullcontext():
        hidden, weight = torch.randn(n, 8, device=device), torch.randn(33, 8, device=device, requires_grad=True)
        call = hidden, ll.LMHead(weight), torch.full((n,), -100, device=device)
        reference = hidden.flip(0), ll.LMHead(weight.detach().flip(0))
        losses = [
            ll.linear_cross_entropy(*call, backend="triton"),
            ll.token_loss(lambda stats: -stats.logprob, *call, want=("logprob",), backend="triton"),
            ll.token_stats(*call, want=("jsd",), reference=reference, backend="triton").jsd.sum(),
        ]
        sum(losses).backward()
        assert ll.sample_tokens(hidden, call[1]).token.shape == (n,)
    assert [x.item() for x in losses] == [0, 0, 0]
    assert not weight.grad.any()


def test_token_loss_twice_backward(device):
    ops = operands((11,), 7, 1031, reference=True).on(device)

    def loss_fn(stats: ll.TokenStats, advantages: torch.Tensor) -> torch.Tensor:
        return -(stats.logprob.exp() * advantages) - 0.1 * stats.entropy + 0.2 * stats.kl

    advantages = torch.randn(11, dtype=torch.float64, device=device)
    options = {"want": ("logprob", "entropy", "kl"), "reference": ops.reference}
    exact = dense_token_stats(ops.hidden, ops.head, ops.labels, **options)
    wanted = torch.autograd.grad(loss_fn(ll.TokenStats(exact), advantages).mean(), list(ops.leaves.values()))
    options |= {"inputs": (advantages,), "backend": "triton", "memory_budget": 40_000}
    loss = ll.token_loss(loss_fn, ops.hidden, ops.head, ops.labels, **options)
    for _ in range(2):
        found = torch.autograd.grad(3 * loss, list(ops.leaves.values()), retain_graph=True)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, 3 * theirs, rtol=1e-9, atol=1e-11)
