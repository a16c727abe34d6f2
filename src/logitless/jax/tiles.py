"""One head applied to a block of tokens, a slice of its vocabulary at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

Dtype = jnp.dtype


class Window(NamedTuple):
    """Some places of an axis; the last window is moved back inside, and shares places with the one before."""

    start: Array
    fresh: Array  # (size,) whether no window before this one had the place


def windows(size: int, total: int) -> int:
    """How many windows an axis takes."""
    return -(-total // size)


def window(i: Array, size: int, total: int) -> Window:
    """The i-th window of `size` places out of `total`: no size needs padding."""
    first = i * size
    start = jnp.minimum(first, total - size)
    return Window(start, start + jnp.arange(size, dtype=start.dtype) >= first)


def take(x: Array, start: Array, size: int) -> Array:
    """x[start : start + size]."""
    if size == x.shape[0]:  # XLA would copy it
        return x
    return lax.dynamic_slice_in_dim(x, start, size, 0)


def put(x: Array, start: Array, part: Array) -> Array:
    """`x` with `part` added at x[start : start + size]."""
    return lax.dynamic_update_slice_in_dim(x, take(x, start, part.shape[0]) + part, start, 0)


def product(a: Array, b: Array, axes: tuple[int, int], dtype: Dtype) -> Array:
    """The matrix product of `a` and `b` over their `axes`, accumulated and returned in `dtype`."""
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=dtype)


def compute_dtype(hidden: Array) -> Dtype:
    """The dtype of statistics, losses and accumulated gradients: fp32, fp64 for fp64 inputs."""
    return jnp.dtype(jnp.float64 if hidden.dtype == jnp.float64 else jnp.float32)


def operand_dtype(hidden: Array, weight: Array) -> Dtype:
    """The products' operands keep a 16-bit dtype where the device multiplies it: a CPU converts slices anyway."""
    low = hidden.dtype == weight.dtype and hidden.dtype.itemsize == 2
    return hidden.dtype if low and jax.default_backend() != "cpu" else compute_dtype(hidden)


@dataclass(frozen=True)
class Projection:
    """z = outer·tanh(inner·(hW + b)) or inner·(hW + b); dz/d(hW) = slope where the softcap is flat."""

    hidden: Array  # (C, H) in the operands' dtype
    weight: Array  # (V, H)
    bias: Array | None  # (V,)
    inner: float | Array  # a number, or (C,) where the temperature is per token
    outer: float | Array | None
    slope: float | Array
    compute: Dtype

    @classmethod
    def of(
        cls,
        hidden: Array,
        weight: Array,
        bias: Array | None,
        scale: float,
        softcap: float | None,
        temperature: float | Array,
        compute: Dtype,
    ) -> Projection:
        if isinstance(temperature, Array):
            temperature = temperature.astype(compute)
        inner = scale / (softcap or temperature)
        outer = softcap / temperature if softcap else None
        rows = hidden.astype(operand_dtype(hidden, weight))
        return cls(rows, weight, bias, inner, outer, scale / temperature, compute)

    def operand(self, start: Array, width: int, exists: Array | None) -> Array:
        """A slice of W in the operands' dtype, with 0 in the rows that do not exist."""
        w = take(self.weight, start, width).astype(self.hidden.dtype)
        return w if exists is None else jnp.where(exists[:, None], w, jnp.zeros_like(w))

    def logits(self, w: Array, start: Array) -> Array:
        """z of one slice, (C, S)."""
        z = product(self.hidden, w, (1, 1), self.compute)
        if self.bias is not None:
            z = z + take(self.bias, start, w.shape[0]).astype(self.compute)
        return self._transform(z)

    def at(self, ids: Array) -> Array:
        """z at one entry per token, (C,) -> (C,): a dot product each."""
        rows = self.weight[ids].astype(self.compute)
        z = (self.hidden.astype(self.compute) * rows).sum(1)
        if self.bias is not None:
            z = z + self.bias[ids].astype(self.compute)
        return self._transform(z)

    def _transform(self, z: Array) -> Array:
        inner: Any = column(self.inner) if z.ndim == 2 else self.inner
        outer: Any = column(self.outer) if z.ndim == 2 else self.outer
        if not (isinstance(inner, float) and inner == 1.0):
            z = z * inner
        return z if outer is None else jnp.tanh(z) * outer

    def chain(self, dz: Array, z: Array) -> Array:
        """dL/d(hW) from dL/dz, (C, S): the row factor and the softcap's derivative."""
        if not (isinstance(self.slope, float) and self.slope == 1.0):
            dz = dz * column(self.slope)
        return dz if self.outer is None else dz * (1 - jnp.square(z / column(self.outer)))


def column(x: Any) -> Any:
    """A number per token as a column, to go with a slice."""
    return x[:, None] if isinstance(x, Array) else x
