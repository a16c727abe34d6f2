"""Which entries of a row the rules keep, without a sort: their end is found bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...algebra.rules import Rules


def kept(rules: Rules, x: Array, logsumexp: Array) -> Array:
    """Which entries of a row of scaled logits x (V,), none above 0, are kept; `logsumexp` is of all of them.

    Those that `Rules.kept_of` the sorted row keeps. Price: a pass over the row for each bit of a number and of a place.
    """
    keep = x > -jnp.inf
    if rules.top_k:
        keep = keep & _prefix(x, keep.astype(jnp.int32), min(rules.top_k, x.shape[0]))
    if rules.min_p_first:
        keep = keep & rules.near_best(x, x.max())
    if rules.top_p < 1:
        if rules.top_k or rules.min_p_first:
            logsumexp = jax.nn.logsumexp(jnp.where(keep, x, -jnp.inf))
        keep = keep & _prefix(x, jnp.where(keep, jnp.exp(x - logsumexp), 0.0), rules.top_p)
    if rules.min_p:
        keep = keep & rules.near_best(x, x.max())
    return keep


def _prefix(x: Array, weight: Array, share: float) -> Array:
    """The entries, highest first and of equal ones the first, before which there is less than `share` of the weight."""
    size = x.dtype.itemsize * 8
    # In the order of |x|: the highest entries have the least.
    magnitude = lax.bitcast_convert_type(jnp.abs(x), jnp.dtype(f"int{size}"))
    place = jnp.arange(x.shape[0], dtype=magnitude.dtype) + (magnitude & 0)  # varies over devices as it does
    last = _largest(lambda b: jnp.where(magnitude < b, weight, 0).sum() < share, magnitude[0], size - 1)
    before, equal = jnp.where(magnitude < last, weight, 0).sum(), magnitude == last
    bits = x.shape[0].bit_length()
    end = _largest(lambda p: before + jnp.where(equal & (place < p), weight, 0).sum() < share, place[0], bits)
    return (magnitude < last) | (equal & (place <= end))


def _largest(holds: Callable[[Array], Array], like: Array, bits: int) -> Array:
    """The largest whole number of so many bits that holds, of a condition that holds for 0 and up to some number."""
    one = jnp.ones_like(like)

    def step(i: Array, found: Array) -> Array:
        """One bit more."""
        tried = found | (one << jnp.asarray(bits - 1 - i, like.dtype))
        return jnp.where(holds(tried), tried, found)

    return lax.fori_loop(0, bits, step, like & 0)
