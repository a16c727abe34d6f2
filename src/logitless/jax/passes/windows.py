"""An axis cut into windows of one size, and parts of an array along it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Window(NamedTuple):
    """Some places of an axis; the last window is moved back inside, and shares places with the one before."""

    start: Array
    fresh: Array  # (size,) whether no window before this one had the place


def windows(size: int, total: int) -> int:
    """How many windows an axis takes."""
    return -(-total // size)


def window(i: Array, size: int, total: int) -> Window:
    """The i-th window of `size` places out of `total`: no size needs padding."""
    unmoved = i * size
    start = jnp.minimum(unmoved, total - size)
    return Window(start, start + jnp.arange(size, dtype=start.dtype) >= unmoved)


def take(x: Array, start: Array, size: int) -> Array:
    """x[start : start + size]."""
    if size == x.shape[0]:  # XLA would copy it
        return x
    return lax.dynamic_slice_in_dim(x, start, size, 0)


def put(x: Array, start: Array, part: Array) -> Array:
    """`x` with `part` added at x[start : start + size]."""
    return lax.dynamic_update_slice_in_dim(x, take(x, start, part.shape[0]) + part, start, 0)
