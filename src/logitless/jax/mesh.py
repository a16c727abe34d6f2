"""Under `jax.shard_map`: what varies over which axes of the mesh, and the sums of all devices' parts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..algebra.online_softmax import Accumulation, merge

Axes = tuple[str, ...]


def varies(tree: Any) -> Axes:
    """The mesh axes that the arrays of `tree` vary over; none outside of shard_map."""
    return tuple(sorted({axis for x in jax.tree.leaves(tree) for axis in jax.typeof(x).mat.varying}))


def varying(tree: Any, axes: Iterable[str]) -> Any:
    """`tree` as varying over `axes` too: a loop's state has one type from its first turn on."""

    def cast(x: Array) -> Array:
        missing = tuple(axis for axis in axes if axis not in varies(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def summed_like(gradient: Array, primal: Array) -> Array:
    """The gradient of an operand: summed over the devices that share it, in its dtype."""
    shared = tuple(axis for axis in varies(gradient) if axis not in varies(primal))
    return (lax.psum(gradient, shared) if shared else gradient).astype(primal.dtype)


def from_owner(x: Array, mine: Array, axis: str | None) -> Array:
    """Numbers that one device of the axis has, on all of them."""
    return x if axis is None else lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), axis)


def merge_devices(sums: Accumulation, axis: str | None) -> Accumulation:
    """The accumulation of every device's part, merged in the order of the devices: bitwise equal on each."""
    if axis is None:
        return sums
    parts = lax.all_gather(dict(sums.items()), axis, to="invarying")
    each = (Accumulation(**{name: x[rank] for name, x in parts.items()}) for rank in range(lax.axis_size(axis)))
    return reduce(lambda x, y: merge(x, y, jnp), each)
