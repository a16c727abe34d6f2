"""One head applied to a block of tokens, a slice of its vocabulary at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..call import compute_dtype
from ..head import LMHead
from .windows import take


def product(a: Array, b: Array, axes: tuple[int, int], dtype: jnp.dtype) -> Array:
    """The matrix product of `a` and `b` over their `axes`, accumulated and returned in `dtype`."""
    # Where nobody set jax_default_matmul_precision, a GPU takes fp32 for TF32, and a TPU for bf16.
    asked = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    precision = lax.Precision.HIGHEST if asked is None and a.dtype == jnp.float32 else None
    over = (axes[0],), (axes[1],)
    return lax.dot_general(a, b, (over, ((), ())), precision=precision, preferred_element_type=dtype)


def operand_dtype(hidden: Array, weight: Array) -> jnp.dtype:
    """The products' operands keep a 16-bit dtype where the device multiplies it: a CPU converts slices anyway."""
    half = hidden.dtype == weight.dtype and hidden.dtype.itemsize == 2
    return hidden.dtype if half and jax.default_backend() != "cpu" else compute_dtype(hidden)


def logits_grad_dtype(operand: jnp.dtype, compute: jnp.dtype) -> jnp.dtype:
    """What dL/dz is rounded to for its products: as the operands, but fp16 has no room for what a mean makes of p."""
    return compute if operand == jnp.float16 else operand


def column(x: Any) -> Any:
    """A number per token as a column, to go with a slice."""
    return x[:, None] if isinstance(x, Array) else x


@dataclass(frozen=True)
class Projection:
    """z = outer·tanh(inner·(hW + b)) or inner·(hW + b); dz/d(hW) = row_scale where the softcap is flat."""

    hidden: Array  # (C, H) in the operands' dtype
    weight: Array  # (V, H)
    bias: Array | None  # (V,)
    inner: float | Array  # a number, or (C,) where the temperature is per token
    outer: float | Array | None
    row_scale: float | Array
    compute: jnp.dtype

    @classmethod
    def of(cls, hidden: Array, head: LMHead, temperature: float | Array, compute: jnp.dtype) -> Projection:
        """The head's projection of hidden states (C, H), at one temperature or one for each token (C,)."""
        if isinstance(temperature, Array):
            temperature = temperature.astype(compute)
        return cls(
            hidden=hidden.astype(operand_dtype(hidden, head.weight)),
            weight=head.weight,
            bias=head.bias,
            inner=head.scale / (head.softcap or temperature),
            outer=head.softcap / temperature if head.softcap else None,
            row_scale=head.scale / temperature,
            compute=compute,
        )

    def operand(self, start: Array, width: int, exists: Array | None) -> Array:
        """A slice of W in the operands' dtype, with 0 in the rows that do not exist."""
        weight = take(self.weight, start, width).astype(self.hidden.dtype)
        return weight if exists is None else jnp.where(exists[:, None], weight, jnp.zeros_like(weight))

    def logits(self, weight: Array, start: Array) -> Array:
        """z of one slice, (C, S), whose rows of W are `weight`."""
        z = product(self.hidden, weight, (1, 1), self.compute)
        if self.bias is not None:
            z = z + take(self.bias, start, weight.shape[0]).astype(self.compute)
        return self._transform(z)

    def at(self, rows: Array) -> Array:
        """z at one row of W per token, (C,) -> (C,): a dot product each."""
        weight = self.weight[rows].astype(self.compute)
        z = (self.hidden.astype(self.compute) * weight).sum(1)
        if self.bias is not None:
            z = z + self.bias[rows].astype(self.compute)
        return self._transform(z)

    def _transform(self, z: Array) -> Array:
        inner: Any = column(self.inner) if z.ndim == 2 else self.inner
        outer: Any = column(self.outer) if z.ndim == 2 else self.outer
        if not (isinstance(inner, float) and inner == 1.0):
            z = z * inner
        return z if outer is None else jnp.tanh(z) * outer

    def chain(self, dz: Array, z: Array) -> Array:
        """dL/d(hW) from dL/dz, (C, S): the row scale and the softcap's derivative."""
        if not (isinstance(self.row_scale, float) and self.row_scale == 1.0):
            dz = dz * column(self.row_scale)
        return dz if self.outer is None else dz * (1 - jnp.square(z / column(self.outer)))
