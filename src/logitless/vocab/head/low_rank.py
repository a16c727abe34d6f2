"""`LowRank`: what LoRA adds to a head."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from torch import Tensor

from ...algebra.options import is_in_float32
from ...errors import DeviceError, DtypeError, OptionError, ShapeError
from ..dtypes import dtype_of
from .shard import check_plain, is_dtensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """A low-rank addition to a head's product: scaling · (dropout(h) · aᵀ) · bᵀ.

    Dense equivalent:

        z = F.linear(hidden, weight) + scaling * F.linear(F.linear(F.dropout(hidden, dropout), a), b)

    a: (R, H), b: (V, R), floating, trained or not; dropout: the share of hidden's elements that are left out, 0
    outside training. Holds references, copies nothing. Raises ShapeError, DtypeError, DeviceError, OptionError.
    LoRA: Hu et al., arXiv 2106.09685.
    """

    a: Tensor  # (R, H)
    b: Tensor  # (V, R)
    scaling: float = 1.0
    dropout: float = 0.0

    def __repr__(self) -> str:
        return in_shapes(self)

    def __post_init__(self) -> None:
        for name, x in (("a", self.a), ("b", self.b)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                got = dtype_of(x)
                raise DtypeError(f"LowRank: {name} must be a floating point tensor, got {got}")
            if not is_dtensor(x):  # what the head makes of one is known with its weight
                check_plain(f"LowRank: {name}", x)
        a, b = tuple(self.a.shape), tuple(self.b.shape)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] == 0:
            raise ShapeError(f"LowRank: expected a (rank, hidden) and b (vocab, rank) of a rank ≥ 1, got {a} and {b}")
        if self.a.device != self.b.device:
            raise DeviceError(f"LowRank: a is on {self.a.device}, b on {self.b.device}; move one")
        if not is_in_float32(self.scaling):
            raise OptionError(f"LowRank: scaling must be a finite number, in float32 too, got {self.scaling}")
        if not isinstance(self.dropout, Real) or not 0 <= self.dropout < 1:
            raise OptionError(f"LowRank: dropout must be a share in 0 ≤ p < 1, got {self.dropout}")
        object.__setattr__(self, "scaling", float(self.scaling))
        object.__setattr__(self, "dropout", float(self.dropout))


def in_shapes(parts: Any) -> str:
    """What `repr` says of a head or its adapter: tensors by their shapes, and nothing that is as by default."""
    shown = {f.name: getattr(parts, f.name) for f in fields(parts)}
    shown = {name: tuple(x.shape) if hasattr(x, "shape") else x for name, x in shown.items()}
    said = (f"{f.name}={shown[f.name]!r}" for f in fields(parts) if shown[f.name] != f.default)
    return f"{type(parts).__name__}({', '.join(said)})"
