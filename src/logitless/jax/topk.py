"""The best entries of rows, exact, equal ones by id: of a whole slice, over slices, over devices."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

Best = tuple[Array, Array]  # logits and ids, (C, k), best first


def top_k(z: Array, k: int) -> Best:
    """`lax.top_k` of (C, S), sorting few entries: no entry outside of the k blocks with the best maxima is among them.

    Were one, each of these blocks would have an entry before it: a higher one, or an equal one with a lower place.
    """
    block = 1 << max(0, round(math.log2(z.shape[1] / k) / 2))
    count = z.shape[1] // block
    if block < 8 or count <= k:
        return lax.top_k(z, k)
    blocks = z[:, : count * block].reshape(-1, count, block)
    chosen = jnp.sort(lax.top_k(blocks.max(2), k)[1], axis=1)  # in the order of places, which decides among equals
    among = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(-1, k * block)
    places = (chosen[:, :, None] * block + jnp.arange(block, dtype=jnp.int32)).reshape(-1, k * block)
    rest = jnp.broadcast_to(jnp.arange(count * block, z.shape[1], dtype=jnp.int32), (z.shape[0], z.shape[1] % block))
    return best_of(jnp.concatenate([among, z[:, count * block :]], 1), jnp.concatenate([places, rest], 1), k)


def best_of(values: Array, ids: Array, k: int) -> Best:
    """The k best of some entries (C, n); of equal ones the first."""
    top, order = lax.top_k(values, k)
    return top, jnp.take_along_axis(ids, order, 1)


def better(best: Best, z: Array, first: Array) -> Best:
    """The best entries with a slice's (C, S) merged in; looked for only where one of the slice's is better."""
    k = best[0].shape[1]

    def merge_in(best: Best) -> Best:
        new, where = top_k(z, min(k, z.shape[1]))
        return best_of(jnp.concatenate([best[0], new], 1), jnp.concatenate([best[1], where + first], 1), k)

    return lax.cond((z.max(1) > best[0][:, -1]).any(), merge_in, lambda best: best, best)


def best_of_all(best: Best, axis: str) -> Best:
    """The best entries among those of every device of a mesh axis."""
    k = best[0].shape[1]
    values, ids = (jnp.concatenate(list(lax.all_gather(x, axis, to="invarying")), 1) for x in best)
    return best_of(values, ids, k)
