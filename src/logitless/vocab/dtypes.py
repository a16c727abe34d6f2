"""What dtypes a pass takes and computes in."""

from typing import TypeGuard

import torch
from torch import Tensor


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of statistics, losses and accumulated gradients: fp32, fp64 for fp64 inputs."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def of_integers(x: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor of integers; booleans are none: a mask is no tensor of ids."""
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def dtype_of(x: object) -> str:
    """A tensor's dtype, or the type of what is none: what errors say that they got."""
    return str(x.dtype if isinstance(x, Tensor) else type(x).__name__)
