"""`QuantisedWeight`: a frozen head as it is stored, in few bits, of which rows are dequantised where they are used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from typing import Protocol

import torch
from torch import Tensor

from ...errors import ConfigError, OptionError
from .gguf import block_format, check_blocks, read_blocks

BLOCK = {"cpu": 1 << 17}  # numbers that are dequantised at a time: on a CPU what stays in its caches
GPU_BLOCK = 1 << 22


class Format(Protocol):
    """How stored tensors are the rows of a matrix."""

    @property
    def name(self) -> str: ...

    def decoded(self, parts: tuple[Tensor, ...], rows: slice | Tensor) -> Tensor:
        """Some rows, (n, H), before they are rounded to the weight's dtype."""
        ...


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A head's (V, H) weight in a quantised format; `LMHead` takes it in a tensor's place.

    Dense equivalent:

        weight = torch.from_numpy(gguf.quants.dequantize(blocks, kind))  # or tensor.dequantize()

    Nothing of it is trained: a pass dequantises the rows of one slice at a time into a buffer within its budget, and
    the rows at labels and candidates, and keeps neither. So each chunk of tokens pays for dequantising the vocabulary
    once in the forward pass, and once more where the backward pass looks at it again.
    parts: the tensors as stored, by reference; dtype: what their numbers are rounded to, as a model would that holds
    them dequantised. `gguf`, `from_gguf` and, for tensors of torchao and bitsandbytes, `of` make one.
    Raises ConfigError, DtypeError, ShapeError, OptionError.
    """

    parts: tuple[Tensor, ...]
    format: Format
    shape: torch.Size  # (V, H)
    dtype: torch.dtype = torch.float32
    first: int = 0  # the stored row that is this weight's first

    requires_grad = False

    def __post_init__(self) -> None:
        if any(x.requires_grad for x in self.parts):
            raise ConfigError(trained(self.format.name))
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise OptionError(f"QuantisedWeight: dtype must be a floating dtype, got {self.dtype}")

    @classmethod
    def gguf(cls, blocks: Tensor, kind: str, *, dtype: torch.dtype = torch.float32) -> QuantisedWeight:
        """A weight of GGUF blocks (V, bytes of a row) uint8 of a kind: Q8_0, Q4_K, Q6_K and the like."""
        form = block_format(kind)
        check_blocks(blocks, form)
        return cls((blocks,), form, torch.Size((blocks.shape[0], form.width(blocks))), dtype)

    @classmethod
    def from_gguf(
        cls, path: str | PathLike[str], name: str | None = None, *, dtype: torch.dtype = torch.float32
    ) -> QuantisedWeight:
        """The output head of a GGUF file (the embedding, where these are tied), or its tensor `name`.

        The blocks are mapped from the file, not read into memory.
        """
        return cls.gguf(*read_blocks(str(path), name), dtype=dtype)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors as stored."""
        return sum(x.numel() * x.itemsize for x in self.parts)

    def to(self, device: torch.device | str) -> QuantisedWeight:
        """The same weight with its stored tensors on a device."""
        return replace(self, parts=tuple(x.to(device) for x in self.parts))

    def detach(self) -> QuantisedWeight:
        """The weight itself, as a tensor that is a constant."""
        return self

    def __getitem__(self, rows: slice) -> QuantisedWeight:
        """Consecutive rows, of the same stored tensors."""
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise OptionError(f"QuantisedWeight: expected consecutive rows, got a step of {step}")
        return replace(self, shape=torch.Size((max(0, stop - start), self.shape[1])), first=self.first + start)

    def rows(self, v: slice, out: Tensor) -> Tensor:
        """The rows from v.start to v.stop, dequantised into `out` (S, H) of any floating dtype."""
        step = max(1, BLOCK.get(out.device.type, GPU_BLOCK) // self.shape[1])
        for start in range(v.start, v.stop, step):
            stop = min(start + step, v.stop)
            stored = slice(self.first + start, self.first + stop)
            part = out[start - v.start : stop - v.start]
            part.copy_(self.format.decoded(self.parts, stored).view_as(part).to(self.dtype))
        return out

    def rows_at(self, ids: Tensor) -> Tensor:
        """The rows of some ids, (n,) -> (n, H), dequantised."""
        return self.format.decoded(self.parts, ids + self.first).to(self.dtype)

    def dequantised(self) -> Tensor:
        """The whole weight, (V, H), which no pass makes."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.rows(slice(0, self.shape[0]), out)

    def __repr__(self) -> str:
        return f"QuantisedWeight({self.format.name}, {tuple(self.shape)}, {self.dtype}, {self.device})"


Weight = Tensor | QuantisedWeight


def plain(weight: Weight) -> Tensor:
    """The weight as a tensor, dequantised as a whole where it is quantised."""
    return weight if isinstance(weight, Tensor) else weight.dequantised()


def trained(kind: str) -> str:
    """Why a quantised weight that requires grad is refused."""
    return (
        f"LMHead: weight is quantised ({kind}) and requires grad, expected it frozen; call requires_grad_(False) and "
        "train LoRA factors, or dequantise it first"
    )
