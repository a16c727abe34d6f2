"""Small stable pieces shared by the losses."""

import math

import torch
from torch import Tensor

from ..errors import ShapeError


def same_shape(logprob: Tensor, /, **others: Tensor | None) -> None:
    """Refuse silent broadcasting: (T,) advantages against (T, T) log-probs would pair the wrong tokens."""
    for name, other in others.items():
        if other is not None and other.shape not in (logprob.shape, ()):
            raise ShapeError(
                f"{name} must have the log-probs' shape {tuple(logprob.shape)}, got {tuple(other.shape)}: "
                f"expand one number per sequence with `{name}[:, None].expand_as(logprob)`"
            )


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, accurate at both ends; x = 0 counts as the nearest number below it."""
    x = x.clamp_max(-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


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
    y = torch.where(near, x, torch.zeros_like(x))  # far from 0 the series would overflow, and its slope be NaN
    series = y * y * (1 / 2 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y / 720))))
    return torch.where(near, series, torch.expm1(x) - x)
