"""Soft tokens from whole rows of logits in float64: what `logitless.relax` is held against."""

import torch
from torch import Tensor

from logitless.relax import Noise
from logitless.vocab.reference import dense_logits
from tests.support.vocab.comparing import Operands, assert_near_in_norm

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-5}


def some_noise(lead: tuple[int, ...]) -> Noise:
    return Noise(torch.randint(2**62, lead), torch.randint(100, lead))


def dense_weights(ops: Operands, tau: float, noise: Noise, k: int, hard: bool) -> tuple[Tensor, Tensor]:
    """(weights over the whole vocabulary (..., V), token (...)), scattered as a widely copied implementation does."""
    z = dense_logits(ops.hidden, ops.head)
    noise = noise.expand(tuple(z.shape[:-1]))
    top, ids = z.topk(k or z.shape[-1])
    noisy = top + noise.gumbel(ids).double()
    best = noisy.argmax(-1, keepdim=True)
    soft = (noisy / tau).softmax(-1)
    if hard:
        soft = torch.zeros_like(soft).scatter(-1, best, 1.0) - soft.detach() + soft
    return torch.zeros_like(z).scatter(-1, ids, soft), ids.gather(-1, best)[..., 0]


def assert_gradients(
    outputs: list[Tensor], leaves: list[Tensor], expected: list[Tensor], exact: list[Tensor], tolerance: float
) -> None:
    """Values, and gradients under random cotangents, equal; `exact` are float64 leaves of the same numbers."""
    for got, want in zip(outputs, expected, strict=True):
        assert got.shape == want.shape
        assert_near_in_norm(got.detach(), want.detach(), tolerance)
    up = [torch.randn_like(want) for want in expected]
    if not leaves:
        return
    found = torch.autograd.grad(outputs, leaves, [u.to(x.dtype) for u, x in zip(up, outputs, strict=True)])
    up = [u.to(x.dtype).double() for u, x in zip(up, outputs, strict=True)]
    wanted = torch.autograd.grad(expected, exact, up)
    for leaf, got, want in zip(leaves, found, wanted, strict=True):
        assert got.dtype == leaf.dtype
        rounding = 2**-8 if leaf.dtype == torch.bfloat16 else 0.0
        assert_near_in_norm(got, want, 2 * tolerance + rounding)
