"""A head's low-rank additions as one more product of the pass: lora_hidden (N, R) · lora_bᵀ (R, V).

`lora_hidden` is formed before the pass, by autograd, which so owns the gradients of a and the dropout masks; the pass
gives the gradients of `lora_hidden` and `lora_b`. Several adapters stand side by side: R is the sum of their ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...upstream import refuse_duals
from ..devices import full_precision
from ..dtypes import compute_dtype
from ..head.lm_head import LMHead
from ..head.low_rank import LowRank
from ..head.shard import VocabShard
from ..ranks.collectives import first_on_all
from .call import Call, storable

BLOCK = 2048  # tokens whose hidden states are widened at a time


def with_lora(call: Call, reference: LMHead | None = None, rows: Tensor | None = None) -> Call:
    """The call with the adapters' products of its hidden states; those of `reference`, as given, are constants.

    rows: the tokens that count, where no labels say.
    """
    i = call.inputs
    inputs = i._replace(lora_hidden=lora_hidden_of(i.hidden, call.head, _counts(call, rows)))
    if reference is not None and inputs.ref_hidden is not None:
        wide = inputs.ref_hidden.double() if call.compute == torch.float64 else inputs.ref_hidden
        with torch.no_grad():
            inputs = inputs._replace(ref_lora_hidden=lora_hidden_of(wide, reference))
    return replace(call, inputs=inputs)


def _counts(call: Call, rows: Tensor | None) -> Tensor | None:
    """Which tokens count, (N, 1), for a head with adapters; None: all."""
    labels = call.inputs.labels
    if not call.head.adapters:
        return None
    if labels is not None:
        return (labels != call.options.ignore_index)[:, None]
    if rows is None:
        return None
    return rows.new_zeros(call.inputs.hidden.shape[0], 1, dtype=torch.bool).index_fill_(0, rows, True)


def agreed(call: Call, *given: Tensor) -> Call:
    """The call, before `with_lora`, once the ranks have agreed on it; given: as `Call.agree` takes them."""
    return replace(call, head=stand_in(call).agree(*given).head)


def stand_in(call: Call) -> Call:
    """The call with an empty `lora_hidden` that requires a gradient where the real one would."""
    hidden, lora_b = call.inputs.hidden, call.inputs.lora_b
    if lora_b is None:
        return call
    trained = hidden.requires_grad or any(x.a.requires_grad for x in call.head.adapters)
    empty = hidden.new_empty(0, lora_b.shape[1]).requires_grad_(trained and torch.is_grad_enabled())
    return replace(call, inputs=call.inputs._replace(lora_hidden=empty))


def lora_b_of(head: LMHead) -> Tensor | None:
    """The adapters' b side by side, (V, R); the very tensor where there is one."""
    if not head.adapters:
        return None
    parts = [x.b for x in head.adapters]
    with full_precision(parts[0].device.type):  # autocast to bf16 joins no fp16 tensors
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def lora_hidden_of(hidden: Tensor, head: LMHead, counts: Tensor | None = None) -> Tensor | None:  # (N, R)
    """The adapters' products of hidden with their a, scaled, side by side, in the compute dtype.

    counts: (N, 1), which tokens do; of the others, whose gradient is 0, NaN reaches no a.
    """
    if not head.adapters:
        return None
    parts = [_scaled(hidden, x, head.shard, counts) for x in head.adapters]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _scaled(hidden: Tensor, x: LowRank, shard: VocabShard | None, counts: Tensor | None) -> Tensor:
    """scaling · dropout(hidden) · aᵀ in the compute dtype."""
    keep, generator = counts, None
    if x.dropout and shard is not None:  # one mask for all ranks
        seed = torch.randint(2**63 - 1, (1,), device=hidden.device)
        generator = torch.Generator(hidden.device).manual_seed(int(first_on_all(seed, shard)))
    if x.dropout:
        keep = torch.empty(hidden.shape, dtype=torch.bool, device=hidden.device)
        keep.bernoulli_(1 - x.dropout, generator=generator)
        if counts is not None:
            keep &= counts
    # a graph's products would be cast by autocast around it: those within an operator are not
    shrink = torch.ops.logitless.lora_hidden if torch.compiler.is_compiling() else _Shrink.apply
    product = shrink(hidden, x.a, keep)
    return product * (x.scaling / (1 - x.dropout))  # pyright: ignore[reportOperatorIssue]


def _widened(hidden: Tensor, keep: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (hidden if keep is None else torch.where(keep, hidden, 0)).to(dtype)


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, n, BLOCK))


def _shrunk(hidden: Tensor, a: Tensor, keep: Tensor | None) -> Tensor:
    """hidden · aᵀ of what is to keep, in the compute dtype."""
    dtype = compute_dtype(hidden)
    product, wide = hidden.new_empty(hidden.shape[0], a.shape[0], dtype=dtype), a.to(dtype).t()
    with full_precision(hidden.device.type):
        for rows in _blocks(hidden.shape[0]):
            kept = None if keep is None else keep[rows]
            torch.mm(_widened(hidden[rows], kept, dtype), wide, out=product[rows])
    return product


def _shrunk_grads(
    up: Tensor, hidden: Tensor, a: Tensor, keep: Tensor | None, to_hidden: bool, to_a: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `_shrunk`, those that are asked for."""
    wide = a.to(up.dtype)
    d_hidden = torch.empty_like(hidden) if to_hidden else None
    d_a = torch.zeros_like(wide) if to_a else None
    with full_precision(hidden.device.type):
        for rows in _blocks(hidden.shape[0]):
            kept = None if keep is None else keep[rows]
            if d_hidden is not None:
                d_hidden[rows] = _widened(up[rows] @ wide, kept, up.dtype)
            if d_a is not None:
                d_a.addmm_(up[rows].t(), _widened(hidden[rows], kept, up.dtype))
    return d_hidden, None if d_a is None else d_a.to(a.dtype)


class _Shrink(torch.autograd.Function):
    """`_shrunk`, whose operands wait for backward as they are, not widened."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, a: Tensor, keep: Tensor | None) -> Tensor:
        ctx.save_for_backward(storable(hidden), storable(a), keep)
        return _shrunk(hidden, a, keep)

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *_shrunk_grads(up, *ctx.saved_tensors, *ctx.needs_input_grad[:2]), None


@torch.library.custom_op("logitless::lora_hidden", mutates_args=())
def _lora_hidden(hidden: Tensor, a: Tensor, keep: Tensor | None) -> Tensor:
    refuse_duals(hidden, a)
    return _shrunk(hidden, a, keep)


@_lora_hidden.register_fake
def _(hidden: Tensor, a: Tensor, keep: Tensor | None) -> Tensor:
    return hidden.new_empty(hidden.shape[0], a.shape[0], dtype=compute_dtype(hidden))


@torch.library.custom_op("logitless::lora_hidden_backward", mutates_args=())
def _lora_hidden_backward(
    up: Tensor, hidden: Tensor, a: Tensor, keep: Tensor | None, to_hidden: bool, to_a: bool
) -> list[Tensor]:
    return [x for x in _shrunk_grads(up, hidden, a, keep, to_hidden, to_a) if x is not None]


@_lora_hidden_backward.register_fake
def _(up: Tensor, hidden: Tensor, a: Tensor, keep: Tensor | None, to_hidden: bool, to_a: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x, wanted in ((hidden, to_hidden), (a, to_a)) if wanted]


def _lora_hidden_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _lora_hidden_grad(ctx: Any, up: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    wanted = ctx.needs_input_grad[:2]
    grads = iter(torch.ops.logitless.lora_hidden_backward(up, *ctx.saved_tensors, *wanted))
    to_hidden, to_a = (next(grads) if there else None for there in wanted)
    return to_hidden, to_a, None


_lora_hidden.register_autograd(_lora_hidden_grad, setup_context=_lora_hidden_setup)
