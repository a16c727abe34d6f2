# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""Kernels for the best entries: those of the best groups of neighbours, and keys read back."""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import MASK, ordered, unordered

LOWEST_KEY = -(2**63) + 1
LOWEST = tl.constexpr(-(2**31))  # below every logit's number


@triton.jit
def best_places(x, low, high, k, room, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """(how many, the lowest) of what is taken of x: its k largest and few more, whose places go to `room` in order.

    x: (BLOCK,) int32, none above `high` and at least k not below `low`. Up to ROOM are taken, the first of equal ones.
    By bisection, which ends once they fit: a few counts, unless many are equal or nearly so.
    """
    count = tl.sum((x >= low).to(tl.int32), 0)
    while (count > ROOM) & (low < high):
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up
        above = tl.sum((x >= middle).to(tl.int32), 0)
        enough = above >= k
        low = tl.where(enough, middle, low)
        count = tl.where(enough, above, count)
        high = tl.where(enough, high, middle - 1)
    taken = x >= low
    if count > ROOM:
        same = x == low
        taken = (x > low) | (same & (tl.cumsum(same.to(tl.int32), 0) <= ROOM - tl.sum((x > low).to(tl.int32), 0)))
    # 16 neighbours are a word: a scan over all, and a store of each, would take ten times as many instructions
    bit = tl.arange(0, 16)[None, :]
    word = tl.sum(tl.where(tl.reshape(taken, (BLOCK // 16, 16)), 0x10000 + (1 << bit), 0), 1)
    word = tl.gather(word, tl.arange(0, BLOCK // 16), 0)  # to the threads that store, at once and not in each turn
    many = word >> 16
    at = tl.cumsum(many, 0) - many
    for _ in range(tl.max(many, 0)):
        lowest = word & -word & 0xFFFF
        place = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # its logarithm
        tl.store(room + at, tl.arange(0, BLOCK // 16) * 16 + place, mask=lowest != 0)
        word -= lowest
        at += 1
    tl.debug_barrier()
    return tl.minimum(count, ROOM), low


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
    """The k best entries of a row of logits, (n, k), from the highest of each group; room: (n, 4·LANES), LANES ≥ k.

    LANES groups at least are as high as the lowest of LANES maxima, of every LANES-th group each; and as many entries
    as the lowest group that is taken.
    """
    ROOM: tl.constexpr = 2 * LANES
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, ROOM)
    raw += row * raw_stride
    groups = room + row * 2 * ROOM
    places = groups + ROOM
    group = tl.arange(0, GROUPS)
    x = tl.load(peaks + row * n_groups + group, mask=group < n_groups, other=LOWEST)
    peak = tl.max(tl.reshape(x, (GROUPS // LANES, LANES)), 0)
    high = tl.max(peak, 0)
    count, low = best_places(x, tl.min(peak, 0), high, n_best, groups, GROUPS, ROOM)
    columns = tl.load(groups + lane, mask=lane < count, other=n_groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    z = tl.load(raw + columns, mask=columns < width, other=-float("inf"))
    y = tl.reshape(ordered(z), (ROOM * GROUP,))
    count, low = best_places(y, tl.where(n_best < k, LOWEST, low), high, k, places, ROOM * GROUP, ROOM)
    place = tl.load(places + lane, mask=lane < count, other=0)
    column = tl.load(groups + place // GROUP) * GROUP + place % GROUP
    there = (lane < count) & (column < width)
    z = tl.load(raw + column, mask=there, other=0.0)
    key = tl.where(there, (ordered(z).to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64)), -(2**63))
    key = tl.sort(key, descending=True)
    tl.store(logits + row * k + lane, logit_of((key >> 32).to(tl.int32)), mask=lane < k)
    tl.store(ids + row * k + lane, 0xFFFFFFFF - (key & 0xFFFFFFFF), mask=lane < k)


@triton.jit(do_not_specialize=["count"])
def decode(keys, logits, ids, count, BLOCK: tl.constexpr):
    """Logits and ids of keys."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    key = tl.load(keys + at, mask=inside, other=0)
    tl.store(logits + at, logit_of((key >> 32).to(tl.int32)), mask=inside)
    tl.store(ids + at, 0xFFFFFFFF - (key & 0xFFFFFFFF), mask=inside)
