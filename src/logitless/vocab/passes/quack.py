"""`linear_cross_entropy` by QuACK, a package of other authors: it forms a whole loss and its gradients by itself.

It is no backend of the pass: its kernels keep a chunk's exponentials in bf16, and have neither the statistics nor the
slices that the contract asks for. What it is not asked for stays as it is in the pass.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...algebra.costs import Slices, quack_slices
from ..backends.base import Gradients
from ..backends.load import load
from ..call.call import Call, Needs
from ..devices import full_precision
from .autograd import FormedLoss, attach
from .gradient import GradientBuffers
from .loss import reduction_scale


def cross_entropy(call: Call, mean: bool, denominator: Tensor | None) -> Tensor:
    """The sum of the tokens' losses, or their mean, with its gradient; of a call that `quack_support` has checked."""
    needs = Needs.of(call.inputs)
    call = call.checked()
    scale = reduction_scale(call, mean, denominator)
    with torch.no_grad():
        loss, total = _formed(call, needs, scale)
    if not needs.any:
        return loss
    return attach(FormedLoss(call, total, partial(_again, needs, scale)), loss, call.inputs)


def slices_for(call: Call) -> Slices:
    """The chunks that a call gets."""
    return quack_slices(call.n_tokens, *call.head.weight.shape, budget=call.budget)


def _again(needs: Needs, scale: Tensor, call: Call) -> GradientBuffers:
    return _formed(call, needs, scale)[1]


def _formed(call: Call, needs: Needs, scale: Tensor) -> tuple[Tensor, GradientBuffers]:
    """The loss, and its gradients with respect to hidden states (bf16) and weight (fp32)."""
    from quack.linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        scaled_exp_linear_cross_entropy_fwd,
    )

    i, n = call.inputs, call.n_tokens
    if n == 0:
        return scale.new_zeros(()), GradientBuffers(call, load("eager"), needs)
    assert i.labels is not None
    assert i.weight is not None
    every = slice(n)  # of the valid tokens: it multiplies what it ignores by zero, and NaN stays NaN
    with torch.cuda.device_of(i.hidden), full_precision(i.hidden.device.type):
        losses, d_hidden, d_weight = scaled_exp_linear_cross_entropy_fwd(
            call.rows(i.hidden.detach(), every).contiguous(),
            i.weight.detach(),
            call.rows(i.labels, every),
            slices_for(call).tokens,
            need_dx=needs.hidden,
            need_dw=needs.weight,
            grad_scale=scale,
        )
    total = GradientBuffers(call, load("eager"), Needs())
    total.gradients = Gradients(_of_all_tokens(call, d_hidden), d_weight)
    return losses[:n].sum() * scale, total


def _of_all_tokens(call: Call, d_hidden: Tensor | None) -> Tensor | None:
    """The valid tokens' gradient, which comes with padding after it, in the places of these tokens; 0 elsewhere."""
    if d_hidden is None:
        return None
    d_hidden = d_hidden[: call.n_tokens]
    if call.index is None:
        return d_hidden
    return torch.zeros_like(call.inputs.hidden).index_copy_(0, call.index, d_hidden)
