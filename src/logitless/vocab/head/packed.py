"""Quantised tensors of torchao and bitsandbytes, known by what they look like: neither package is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from .quantised import QuantisedWeight, trained

SCALED = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")  # torchao's, a number each
FOUR_BIT = "Params4bit"  # bitsandbytes'
NESTED = 256  # of its scales share a scale where these are quantised too


@dataclass(frozen=True)
class Scaled:
    """(q - zero point) · scale, each of a group of a row's numbers; q in int8 or fp8."""

    name: str
    dtype: torch.dtype

    def decoded(self, parts: tuple[Tensor, ...], rows: slice | Tensor) -> Tensor:
        q, scale, *zero = (_rows(x, rows) for x in parts)
        x = q.to(self.dtype).unflatten(1, (scale.shape[1], -1))
        if zero:
            x = x - zero[0].to(self.dtype)[..., None]
        return (x * scale[..., None]).flatten(1)


@dataclass(frozen=True)
class FourBit:
    """code[q] · absmax of each block, two q to a byte; where absmax is a byte too, code2[absmax] · absmax2 + mean."""

    name: str

    def decoded(self, parts: tuple[Tensor, ...], rows: slice | Tensor) -> Tensor:
        packed, absmax, code, *nested = parts
        q, scale = packed[rows], absmax[rows]
        if nested:
            scale = _nested_scale(scale, rows, *nested)
        high, low = code[:, None].expand(16, 16), code.expand(16, 16)
        pairs = torch.stack((high, low), 2).view(256, 2)  # what a byte says
        return (pairs[q.int()].view(*scale.shape, -1) * scale[..., None]).flatten(1)


def _rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    """x[rows], of fp8 as well, which torch does not gather."""
    return x[rows] if x.itemsize > 1 else x.view(torch.uint8)[rows].view(x.dtype)


def _nested_scale(q: Tensor, rows: slice | Tensor, code: Tensor, absmax: Tensor, mean: Tensor) -> Tensor:
    """The blocks' scales (n, blocks) from bytes, each block of them with a scale of its own."""
    numbers = torch.arange(rows.start, rows.stop, device=q.device) if isinstance(rows, slice) else rows
    flat = numbers[:, None] * q.shape[1] + torch.arange(q.shape[1], device=q.device)
    return code[q.int()] * absmax[flat // NESTED] + mean


def quantised(weight: Any) -> Any:
    """The weight of a head, as a `QuantisedWeight` where it is a quantised tensor that is known. Raises ConfigError."""
    kind = type(weight)  # its name comes first: a compiled caller cannot look into a module's
    if kind.__name__ in SCALED and kind.__module__.startswith("torchao."):
        make = _of_torchao
    elif kind.__name__ == FOUR_BIT and getattr(weight, "quant_state", None) is not None:
        make = _of_bitsandbytes
    else:
        return weight
    if weight.requires_grad:
        raise ConfigError(trained(kind.__name__))
    return make(weight)


def _of_torchao(weight: Any) -> QuantisedWeight:
    name = type(weight).__name__
    given = ("act_quant_kwargs", "act_pre_scale", "activation_quantization")
    active = [x for x in given if getattr(weight, x, None) is not None]
    if active:
        raise ConfigError(
            f"LMHead: weight is a {name} whose product quantises or scales hidden states too ({active[0]}), expected a "
            "weight-only one; quantise the head by a WeightOnlyConfig, or leave it as it is"
        )
    rows, width = weight.shape
    high, across = weight.block_size
    if across <= 0 or width % across or (high != 1 and (high, across) != (rows, width)):
        raise ConfigError(
            f"LMHead: weight is a {name} with a scale for every {high} x {across} numbers, expected one for each row, "
            "for groups of a row, or one for all; quantise it so, or dequantise it first"
        )
    scales = [weight.scale, *([] if getattr(weight, "zero_point", None) is None else [weight.zero_point])]
    parts = (weight.qdata, *(x.reshape(-1, width // across).expand(rows, -1) for x in scales))
    return QuantisedWeight(parts, Scaled(f"torchao {name}", weight.dtype), weight.shape, weight.dtype)


def _of_bitsandbytes(weight: Any) -> QuantisedWeight:
    state = weight.quant_state
    shape = torch.Size(state.shape)
    if getattr(state, "packing_format_for_cpu", False):
        raise ConfigError(
            "LMHead: weight is a Params4bit that was packed anew for its own CPU kernel, expected blocks in order; "
            "load the model again and do not call its head in evaluation mode, or dequantise it first"
        )
    if len(shape) != 2 or shape[1] % state.blocksize:
        raise ConfigError(
            f"LMHead: weight is a Params4bit {tuple(shape)} in blocks of {state.blocksize}, expected whole blocks to a "
            "row; quantise it with a blocksize that divides the hidden size, or dequantise it first"
        )
    packed = weight.detach().as_subclass(Tensor).view(torch.uint8).view(shape[0], -1)
    parts = packed, state.absmax.view(shape[0], -1), state.code
    if state.nested:
        parts += state.state2.code, state.state2.absmax, state.offset
        if state.state2.blocksize != NESTED:
            raise ConfigError(f"LMHead: expected scales in blocks of {NESTED}, got {state.state2.blocksize}")
    twice = ", scales quantised" if state.nested else ""
    form = FourBit(f"bitsandbytes {state.quant_type}{twice}")
    return QuantisedWeight(parts, form, shape, state.dtype)
