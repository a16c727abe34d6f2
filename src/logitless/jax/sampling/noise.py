"""Gumbel noise as a function of a sequence's own seed, a position and a vocabulary id, and of nothing else.

The integers are those of `logitless.vocab.noise`, bit for bit, so that a seed draws the same tokens in JAX as in torch:
Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). Products of two 32-bit words are
made of 16-bit halves, for jax has no 64-bit integers unless asked.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...errors import DtypeError, OptionError
from ..mesh import Axes, varies
from ..validate import dtype_of, for_each_token, is_array

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[Array, Array, Array, Array]


class Noise(NamedTuple):
    """Which noise: a seed per sequence and a position per token, of shapes that broadcast to the tokens'. A pytree.

    seeds: (...) integers, negative ones as in two's complement; numpy's may have 64 bits. Inside jit without
    `jax_enable_x64`, where integers have 32, `high` holds the upper words. positions: (...) integers from 0.
    """

    seeds: Any  # (...)
    positions: Any  # (...)
    high: Any = None  # (...) uint32

    @classmethod
    def draw(cls, key: Array, lead: tuple[int, ...], axes: Axes = ()) -> Noise:
        """Noise with a seed of its own for each token, on all devices along `axes`, from a `jax.random` key."""
        for axis in axes:
            if axis not in varies(key):  # else each device has its own
                key = jax.random.fold_in(key, lax.axis_index(axis))
        low, high = jax.random.bits(key, (2, *lead), jnp.uint32)
        return cls(low, jnp.zeros(lead, jnp.int32), high)

    def expand(self, lead: tuple[int, ...]) -> Keys:
        """The words of each of the tokens, or an error that says what is wrong."""
        seeds = _words("seeds", self.seeds, lead)
        if self.high is not None:
            seeds = seeds[0], _words("high", self.high, lead)[0]
        return Keys(*seeds, *_words("positions", self.positions, lead))


class Keys(NamedTuple):
    """Noise as words, (...) uint32 each."""

    low: Array
    high: Array
    position: Array
    position_high: Array

    def gumbel(self, ids: Array) -> Array:
        """Standard Gumbel noise at vocabulary ids (..., k): fp32, finite.

        Uniforms are (w + 1/2)·2⁻³² of a 32-bit word w, strictly inside (0, 1); the noise is right to 1e-6.
        """
        ids = ids.astype(jnp.uint32)
        a, b, c, d = self._blocks(ids >> 2)
        even, lower = ids & 1 == 0, ids & 2 == 0
        return _gumbel_of(jnp.where(lower, jnp.where(even, a, b), jnp.where(even, c, d)))

    def gumbel_from(self, first_id: Array, width: int) -> Array:
        """`gumbel` at the ids first_id, first_id + 1, ..., (..., width): a block of four words serves four of them."""
        first_id = jnp.asarray(first_id, jnp.uint32)
        blocks = (first_id >> 2) + jnp.arange((width + 3) // 4 + 1, dtype=jnp.uint32)
        words = jnp.stack(self._blocks(blocks), -1)
        words = words.reshape(*words.shape[:-2], -1)
        return _gumbel_of(lax.dynamic_slice_in_dim(words, first_id & 3, width, -1))

    def _blocks(self, blocks: Array) -> Words:
        low, high, position, position_high = (x[..., None] for x in self)
        return philox((blocks, position, position_high, jnp.zeros_like(position)), (low, high))


def philox(counter: Words, key: tuple[Array, Array]) -> Words:
    """Philox-4x32-10 of uint32 words, shapes broadcast.

    Rounds are a loop: XLA would else compute all of them anew for each of the four words.
    """
    none = reduce(lambda x, y: x | y, (x & 0 for x in (*counter, *key)))

    def step(i: Array, words: Words) -> Words:
        """One round."""
        a, b, c, d = words
        (p, q), (r, s) = _product(a, MULTIPLIERS[0]), _product(c, MULTIPLIERS[1])
        k, l = (k + jnp.asarray(i, jnp.uint32) * jnp.uint32(w) for k, w in zip(key, WEYL, strict=True))
        return r ^ b ^ k, s, p ^ d ^ l, q

    return lax.fori_loop(0, ROUNDS, step, tuple(x | none for x in counter))


def _product(x: Array, constant: int) -> tuple[Array, Array]:
    """The high and the low word of a 32-bit product."""
    u, v = jnp.uint32(constant >> 16), jnp.uint32(constant & 0xFFFF)
    a, b = x >> 16, x & 0xFFFF
    middle = a * v + (b * v >> 16)  # at most (2¹⁶-1)², and less than 2¹⁶ more
    lower = b * u + (middle & 0xFFFF)
    return a * u + (middle >> 16) + (lower >> 16), x * jnp.uint32(constant)


def _gumbel_of(words: Array) -> Array:
    """-log(-log u) of u = (w + 1/2)·2⁻³², from whichever end of (0, 1) is nearer."""
    upper = words >> 31 == 1
    near = jnp.where(upper, ~words, words).astype(jnp.float32)
    share = (near + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log(jnp.where(upper, -jnp.log1p(-share), -jnp.log(share)))


def _words(name: str, x: Any, lead: tuple[int, ...]) -> tuple[Array, Array]:
    """The low and the high words of integers, of the tokens' shape."""
    if type(x) is int:
        if not -(2**63) <= x < 2**64:
            raise OptionError(f"noise: expected {name} of 64 bits, got {x}")
        x = np.asarray(x % 2**64, np.uint64)
    if not is_array(x, jnp.integer):
        raise DtypeError(f"noise: expected {name} as integers, got {dtype_of(x)}")
    if x.dtype.itemsize == 8:
        words = (x & 0xFFFFFFFF).astype(np.uint32), (x >> 32 & 0xFFFFFFFF).astype(np.uint32)
    else:
        words = lax.convert_element_type(x, jnp.uint32), jnp.where(x < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    low, high = (for_each_token(f"noise: expected {name} that broadcast", word, lead) for word in words)
    return low, high
