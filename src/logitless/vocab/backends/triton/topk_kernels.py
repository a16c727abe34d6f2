# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""Kernels for the best entries: those of the best groups of neighbours, and keys read back."""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import MASK, ordered, unordered

LOWEST_KEY = -(2**63) + 1
LOWEST = tl.constexpr(-(2**31))  # below every logit's number


@triton.jit
def best_places(x, k):
    """(which are among the k largest of x, their places among those from left to right); the first of equal ones.

    x: (BLOCK,) int32. By bisection: 32 counts, whatever k is.
    """
    low = tl.full((), -(2**31), tl.int64)
    high = tl.full((), 2**31 - 1, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((x >= middle).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    more = x > low
    same = x == low
    taken = more | (same & (tl.cumsum(same.to(tl.int32), 0) <= k - tl.sum(more.to(tl.int32), 0)))
    return taken, tl.cumsum(taken.to(tl.int32), 0) - 1


@triton.jit
def logit_of(number):
    """`unordered`, -inf for what is masked."""
    z = unordered(number)
    return tl.where(z <= MASK, -float("inf"), z)


@triton.jit
def best_of_groups(
    raw,
    raw_stride,
    width,
    peaks,
    n_groups,
    n_best,
    k,
    room,
    logits,
    ids,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
):
    """The k best entries of a row of logits, (n, k), from the highest of each group; room: (n, LANES)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    group = tl.arange(0, GROUPS)
    x = tl.load(peaks + row * n_groups + group, mask=group < n_groups, other=LOWEST)
    taken, place = best_places(x, n_best)
    tl.store(room + row * LANES + place, group.to(tl.int64), mask=taken)
    tl.debug_barrier()
    mine = tl.load(room + row * LANES + lane, mask=lane < n_best, other=0)
    columns = mine[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    seen = (lane < n_best)[:, None] & (columns < width)
    z = tl.load(raw + row * raw_stride + columns, mask=seen, other=0.0)
    y = tl.reshape(tl.where(seen, ordered(z), LOWEST), (LANES * GROUP,))
    flat = tl.reshape(columns, (LANES * GROUP,))
    tl.debug_barrier()
    taken, place = best_places(y, k)
    key = (y.to(tl.int64) << 32) | (0xFFFFFFFF - flat)
    tl.store(room + row * LANES + place, key, mask=taken)
    tl.debug_barrier()
    keys = tl.load(room + row * LANES + lane, mask=lane < k, other=-(2**63))
    rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    tl.store(logits + row * k + rank, logit_of((keys >> 32).to(tl.int32)), mask=lane < k)
    tl.store(ids + row * k + rank, 0xFFFFFFFF - (keys & 0xFFFFFFFF), mask=lane < k)


@triton.jit(do_not_specialize=["count"])
def decode(keys, logits, ids, count, BLOCK: tl.constexpr):
    """Logits and ids of keys."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    key = tl.load(keys + at, mask=inside, other=0)
    tl.store(logits + at, logit_of((key >> 32).to(tl.int32)), mask=inside)
    tl.store(ids + at, 0xFFFFFFFF - (key & 0xFFFFFFFF), mask=inside)
