"""Small stable pieces shared by the losses."""

import math

import torch
from torch import Tensor

from ..errors import ShapeError

ONE_PER_SEQUENCE = ("advantages", "mask")  # may hold for a whole sequence, where log-probs would be sums over tokens


def same_shape(logprob: Tensor, /, **others: Tensor | None) -> None:
    """Refuse silent broadcasting: (T,) advantages against (T, T) log-probs would pair the wrong tokens."""
    for name, other in others.items():
        if other is not None and other.shape not in (logprob.shape, ()):
            each = f"expand one number per sequence with `{name}[..., None].expand_as(logprob)`"
            expands = name in ONE_PER_SEQUENCE and other.shape == logprob.shape[:-1]
            advice = each if expands else "give one number for each of them"
            expected = f"the log-probs' shape {tuple(logprob.shape)}"
            raise ShapeError(f"{name} must have {expected}, got {tuple(other.shape)}: {advice}")


def check_record(
    candidate_logits: Tensor, logsumexp: Tensor, tail_logprob: Tensor | None, name: str, weights: Tensor
) -> None:
    """ShapeError unless weights, called `name`, and logits are (..., K), K of 1 or more, and the other two (...)."""
    if candidate_logits.ndim == 0 or weights.shape != candidate_logits.shape:
        expected, got = tuple(candidate_logits.shape), tuple(weights.shape)
        raise ShapeError(f"{name} must have candidate_logits' shape (..., K), here {expected}, got {got}")
    if weights.shape[-1] == 0:
        raise ShapeError(f"candidate_logits must have K of 1 or more ids per token, got {tuple(weights.shape)}")
    same_shape(candidate_logits[..., 0], logsumexp=logsumexp, tail_logprob=tail_logprob)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, accurate at both ends; x = 0 counts as the nearest number below it."""
    x = x.clamp_max(-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


def logprob_of_record(
    candidate_logits: Tensor,  # (..., K), at a record's ids
    logsumexp: Tensor,  # (...)
    real: Tensor,  # (..., K) bool: slots that are no padding
    tail_logprob: Tensor,  # (...), of everything but the record's ids
) -> Tensor:
    """Log-probs at the ids of a record: of a mostly sure distribution from what the ids leave of 1, which has digits.

    So not where another id of weight 0 stands in the place of padding, which names an id of the record once more.
    """
    among = torch.where(real | ~real.any(-1, keepdim=True), candidate_logits, -torch.inf).logsumexp(-1)
    everything = tail_logprob.isneginf()
    together = torch.where(everything, 0.0, log1mexp(torch.where(everything, -1.0, tail_logprob)))
    rounding = 4 * torch.finfo(among.dtype).eps * (1 + logsumexp.abs())
    complete = real.all(-1) | ((among - logsumexp - together).abs() <= rounding)
    mostly = (tail_logprob < -math.log(2)) & among.isfinite() & real.any(-1) & complete
    base, rest = torch.where(mostly, among, logsumexp), torch.where(mostly, together, 0.0)
    return (candidate_logits - base[..., None]) + rest[..., None]


def gap(x: Tensor, y: Tensor) -> Tensor:
    """x - y, held where even its square is finite: under a mask it may be infinite, and a weight of 0 is to end it."""
    far = 0.5 * math.sqrt(torch.finfo(x.dtype).max)
    return (x - y).clamp(-far, far)


def most(dtype: torch.dtype) -> float:
    """The largest exponent that is taken, 79 in fp32: its power of e is finite, with room for a factor."""
    return 0.9 * math.log(torch.finfo(dtype).max)


def ratio(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    """e^(logprob - old_logprob), finite."""
    return torch.exp(gap(logprob, old_logprob).clamp_max(most(logprob.dtype)))


def expm1_minus(x: Tensor) -> Tensor:
    """e^x - 1 - x, never negative: its series near 0, where the subtraction would leave only rounding."""
    near = x.abs() < 1e-2
    y = torch.where(near, x, 0.0)  # a power of a large one overflows, and 0·inf would be its gradient
    series = y * y * (1 / 2 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y / 720))))
    return torch.where(near, series, torch.expm1(x) - x)
