"""The k highest entries of rows, exact, equal ones by id: of one slice, over slices, over devices."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

TopEntries = tuple[Array, Array]  # logits and ids, (C, k), highest first


def top_k(z: Array, k: int) -> TopEntries:
    """`lax.top_k` of (C, S), sorting few entries: the k blocks with the highest maxima hold all of them.

    Were one elsewhere, each of these blocks would have an entry before it: a higher one, or an equal one with a lower
    place.
    """
    z = jnp.where(z == 0, 0.0, z)  # lax.top_k puts -0.0 behind 0.0
    block = 1 << max(0, round(math.log2(z.shape[1] / k) / 2))
    count = z.shape[1] // block
    if block < 8:  # else there are more than k blocks
        return lax.top_k(z, k)
    blocks = z[:, : count * block].reshape(-1, count, block)
    chosen = jnp.sort(lax.top_k(blocks.max(2), k)[1], axis=1)  # in the order of places, which decides among equals
    among = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(-1, k * block)
    places = (chosen[:, :, None] * block + jnp.arange(block, dtype=jnp.int32)).reshape(-1, k * block)
    rest = jnp.broadcast_to(jnp.arange(count * block, z.shape[1], dtype=jnp.int32), (z.shape[0], z.shape[1] % block))
    return topk_of(jnp.concatenate([among, z[:, count * block :]], 1), jnp.concatenate([places, rest], 1), k)


def topk_of(values: Array, ids: Array, k: int) -> TopEntries:
    """The k highest of some entries (C, n); of equal ones the first."""
    top, order = lax.top_k(values, k)
    return top, jnp.take_along_axis(ids, order, 1)


def merge_slice(topk: TopEntries, z: Array, start: Array) -> TopEntries:
    """The top entries with a slice's (C, S) merged in; looked for only where one of the slice's is higher."""
    k = topk[0].shape[1]

    def merged(topk: TopEntries) -> TopEntries:
        new, where = top_k(z, min(k, z.shape[1]))
        return topk_of(jnp.concatenate([topk[0], new], 1), jnp.concatenate([topk[1], where + start], 1), k)

    return lax.cond((z.max(1) > topk[0][:, -1]).any(), merged, lambda topk: topk, topk)


def topk_of_devices(topk: TopEntries, axis: str) -> TopEntries:
    """The top entries among those of every device of a mesh axis."""
    k = topk[0].shape[1]
    values, ids = (jnp.concatenate(list(lax.all_gather(x, axis, to="invarying")), 1) for x in topk)
    return topk_of(values, ids, k)
