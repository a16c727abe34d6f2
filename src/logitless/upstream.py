"""What a pass written by hand has no formula for: tangents, second derivatives, several upstream gradients at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import GradientError

ONE_AT_A_TIME = (
    "logitless: expected one upstream gradient in backward, got a batch of them (is_grads_batched=True or a vectorised "
    "jacobian); call torch.autograd.grad once for each, or pass vectorize=False"
)


def check_upstream(grads: Sequence[Tensor | None], no_second_derivative: str) -> None:
    """Raise GradientError in a backward that is asked for either; no_second_derivative: what it then says."""
    if torch.is_grad_enabled():
        raise GradientError(no_second_derivative)
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 - a module that has no stub
    batched = functorch.is_batchedtensor, functorch.is_legacy_batchedtensor
    if any(is_batched(g) for g in grads if g is not None for is_batched in batched):
        raise GradientError(ONE_AT_A_TIME)


def refuse_duals(*tensors: Any) -> None:
    """GradientError where a tensor has a tangent; a graph's operators ask once it runs."""
    if torch.compiler.is_compiling():
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise GradientError(
            "logitless: expected plain tensors, got a dual one of forward-mode differentiation, whose tangent would be "
            "lost; use torch.autograd.grad, or the dense oracle (logitless.vocab.reference)"
        )
