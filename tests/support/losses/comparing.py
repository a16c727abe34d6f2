"""One way to hold a loss against its dense formula: values, and gradients under a random cotangent."""

from types import SimpleNamespace

import torch

N, V = 12, 23


def problem(n: int = N, v: int = V, spread: float = 3.0):
    """Float64 logits (n, v) that need a gradient, and labels (n,) that reach both ends of the vocabulary."""
    z = (spread * torch.randn(n, v, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(v, (n,))
    labels[0], labels[1] = 0, v - 1
    return z, labels


def stats_of(z, labels, z_ref=None, beta=0.5) -> SimpleNamespace:
    """The statistics that the pass would hand to a loss, from whole logits."""
    logp = z.log_softmax(-1)
    lse = z.logsumexp(-1)
    stats = SimpleNamespace(
        logprob=logp.gather(-1, labels[..., None])[..., 0],
        logsumexp=lse,
        mean_logit=z.mean(-1),
        entropy=-(logp.exp() * logp).sum(-1),
    )
    if z_ref is not None:
        logq = z_ref.log_softmax(-1)
        mixture = ((1 - beta) * logp.exp() + beta * logq.exp()).log()
        stats.kl = (logp.exp() * (logp - logq)).sum(-1)
        stats.reverse_kl = (logq.exp() * (logq - logp)).sum(-1)
        stats.kl_mixture = (logp.exp() * (logp - mixture)).sum(-1)
        stats.reverse_kl_mixture = (logq.exp() * (logq - mixture)).sum(-1)
        stats.jsd = (1 - beta) * stats.kl_mixture + beta * stats.reverse_kl_mixture
        stats.acceptance = torch.minimum(logp.exp(), logq.exp()).sum(-1)
        stats.total_variation = 1 - stats.acceptance
    return stats


def assert_same(ours, dense, *inputs):
    """`ours` and `dense` agree in value and gradient in float64, and nearly so in float32."""
    expected = dense(*inputs)
    cotangent = torch.randn_like(expected)
    leaves = [x for x in inputs if x.requires_grad]
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    got = ours(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    for a, b in zip(torch.autograd.grad(got, leaves, cotangent), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)

    singles = [x.detach().float().requires_grad_(x.requires_grad) for x in inputs]
    got = ours(*singles)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    leaves = [x for x in singles if x.requires_grad]
    for a, b in zip(torch.autograd.grad(got, leaves, cotangent.float()), wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
