"""`logitless verify`: where the logitless loss is chosen, and whether it equals the dense one in value and gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algebra.costs import logits_bytes
from ...integrations.transformers.installed import Method, choose
from ...vocab.face import LMHead, dense_cross_entropy, linear_cross_entropy

TOKENS, HIDDEN = 64, 64
DENSE_BYTES = 2**28  # the float64 logits of the check stay below this
SLICES = 7  # the logitless loss gets an odd fraction of the logits' size, so that slices end everywhere
# Largest error over the largest exact value. A bfloat16 gradient is rounded once at its end: half of 2^-8, and room.
ALLOWED = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (2e-6, 4e-3)}


@dataclass(frozen=True)
class Choice:
    """What `--loss auto` does with sequences of one length."""

    length: int
    logits_bytes: int
    method: Method


@dataclass(frozen=True)
class Check:
    """One comparison with the dense float64 loss."""

    what: str
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed


def choices(lengths: tuple[int, ...], vocab_size: int, threshold: int, dtype: torch.dtype) -> list[Choice]:
    """The method for one sequence of each length, by the size of its logits against the threshold."""
    sizes = [logits_bytes(length, vocab_size, dtype.itemsize) for length in lengths]
    return [Choice(n, size, choose("auto", size, threshold)) for n, size in zip(lengths, sizes, strict=True)]


def check_size(vocab_size: int) -> int:
    """How many tokens the comparison can take."""
    return max(2, min(TOKENS, DENSE_BYTES // (8 * vocab_size)))


def checks(
    vocab_size: int, device: torch.device, seed: int = 0, tell: Callable[[str], None] = lambda what: None
) -> list[Check]:
    """Value and gradients of the logitless loss against the dense float64 one on the same operands.

    The mean over tokens, and per-token losses under a random upstream gradient; in float32 and bfloat16. Some
    tokens are ignored, and labels include the first and the last vocabulary entry. tell: hears what is compared next.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = check_size(vocab_size)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(device)
    weight = (torch.randn(vocab_size, HIDDEN, generator=generator) / HIDDEN**0.5).to(device)
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    labels[0], labels[-1] = 0, vocab_size - 1
    labels[1 : tokens // 2 : 3] = -100
    upstream = torch.randn(tokens, generator=generator).to(device)
    found = []
    for dtype, allowed in ALLOWED.items():
        operands = hidden.to(dtype), weight.to(dtype), labels.to(device)
        for reduction, cotangent in (("mean", torch.ones((), device=device)), ("none", upstream)):
            tell(f"comparing the logitless loss with the dense one, {str(dtype).removeprefix('torch.')}, {reduction}")
            found += _compare(*operands, reduction, cotangent, allowed)
    return found


def _compare(
    hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, upstream: Tensor, allowed: tuple[float, float]
) -> list[Check]:
    name = f"{str(hidden.dtype).removeprefix('torch.')}, {'mean' if reduction == 'mean' else 'per token'}"
    budget = max(1, hidden.shape[0] * weight.shape[0] * 4 // SLICES)
    results = []
    for logitless in (True, False):
        h, w = (x.detach().clone() if logitless else x.detach().double() for x in (hidden, weight))
        for operand in (h, w):
            operand.requires_grad_()
        head = LMHead(w)
        if logitless:
            loss = linear_cross_entropy(h, head, labels, reduction=reduction, memory_budget=budget)
        else:
            loss = dense_cross_entropy(h, head, labels, reduction=reduction)
        loss.backward(upstream.to(loss.dtype))
        results.append((loss.detach(), h.grad, w.grad))
    parts = zip(("value", "gradient of hidden", "gradient of weight"), *results, strict=True)
    value, gradient = allowed
    return [
        Check(f"{name}: {part}", _relative(got, exact), value if part == "value" else gradient)
        for part, got, exact in parts
    ]


def _relative(got: Tensor | None, exact: Tensor | None) -> float:
    """Largest error over the largest exact value; infinite where either is not a number or missing."""
    if got is None or exact is None:
        return float("inf")
    error = float((got.double() - exact).abs().max() / exact.abs().max())
    return error if error == error else float("inf")  # NaN is a failure
