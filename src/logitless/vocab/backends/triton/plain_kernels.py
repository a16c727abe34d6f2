# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""The accumulation of a plain head's products: maximum, sum and entropy's sum alone, in few instructions an entry.

A row is read in LANES columns, each of which has sums of its own until the row ends: nothing goes from thread to
thread on the way, and no thread waits for another. What it computes is the algebra of `algebra/online_softmax.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .accumulate_kernels import PER_TOKEN, REST, ZSUM, M, T, store_sums
from .maths import EMPTY, MASK, load_rows, times

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def larger(x, y):
    """The larger of two; NaN goes through: a model that has diverged must be seen."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def take(rest, t, x, m, power, WITH_T: tl.constexpr):
    """The sums with another entry x that is no lane's maximum m; power: of two, of a unit of x."""
    d = (x - m) * power
    w = tl.exp2(d)
    if WITH_T:
        t += w * d
    return rest + w, t


@triton.jit
def take_four(m, rest, t, x0, x1, x2, x3, power, WITH_T: tl.constexpr):
    """The sums of each lane with four more entries.

    A lane's maximum is none of its other entries, so their sum keeps its digits: the entries change places with it
    until the largest is left over.
    """
    before = m
    m, x0 = larger(m, x0), tl.minimum(m, x0)
    m, x1 = larger(m, x1), tl.minimum(m, x1)
    m, x2 = larger(m, x2), tl.minimum(m, x2)
    m, x3 = larger(m, x3), tl.minimum(m, x3)
    step = (before - m) * power
    grow = tl.exp2(step)
    if WITH_T:
        t = (t + rest * step) * grow
    rest = rest * grow
    rest, t = take(rest, t, x0, m, power, WITH_T)
    rest, t = take(rest, t, x1, m, power, WITH_T)
    rest, t = take(rest, t, x2, m, power, WITH_T)
    rest, t = take(rest, t, x3, m, power, WITH_T)
    return m, rest, t


@triton.jit
def of_lanes(m, rest, t, power, lane, LANES: tl.constexpr, WITH_T: tl.constexpr):
    """The sums of whole rows from those of their lanes."""
    top = tl.max(m, 1)
    step = (m - top[:, None]) * power
    f = tl.exp2(step)
    first = tl.min(tl.where(m == top[:, None], lane, LANES), 1)
    whole = tl.sum(tl.where(lane == first[:, None], rest, (1.0 + rest) * f), 1)
    total = whole
    if WITH_T:
        total = tl.sum(times(f, t + (1.0 + rest) * step), 1) * LN2
    return top, whole, total


@triton.jit(do_not_specialize=["n", "n_parts"], do_not_specialize_on_alignment=PER_TOKEN)
def accumulate_plain_slice(
    raw,
    raw_stride,
    state,
    labels,
    row_scales,
    n,
    width,
    padded,
    start,
    n_parts,
    part_width,
    RAGGED: tl.constexpr,
    FIRST: tl.constexpr,
    LABEL: tl.constexpr,
    WITH_T: tl.constexpr,
    WITH_SUM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `accumulate_slice`, of m, rest, t and zsum alone; a head without bias and softcap, its scale positive."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    live = rows < n
    LANES: tl.constexpr = BLOCK // 4
    lane = tl.arange(0, LANES)[None, :]
    late = load_rows(row_scales, 0, n, rows, live)
    power = (late * LOG2E)[:, None]
    m = tl.full((ROWS, LANES), EMPTY, tl.float32)
    rest = tl.zeros((ROWS, LANES), tl.float32)
    t = tl.zeros((ROWS, LANES), tl.float32)
    zsum = tl.zeros((ROWS, LANES), tl.float32)
    label = tl.full((ROWS,), -1, tl.int64)
    if LABEL:
        label = tl.load(labels + rows, mask=live, other=-1)
    own = raw + rows[:, None] * raw_stride + lane
    begin = part * part_width
    stop = tl.minimum(begin + part_width, width)
    edge = tl.minimum(begin + part_width, padded)
    whole = begin + tl.maximum(stop - begin, 0) // BLOCK * BLOCK
    for column in range(begin, whole, BLOCK):
        x0 = tl.load(own + column, mask=live[:, None], other=0.0)
        x1 = tl.load(own + column + LANES, mask=live[:, None], other=0.0)
        x2 = tl.load(own + column + 2 * LANES, mask=live[:, None], other=0.0)
        x3 = tl.load(own + column + 3 * LANES, mask=live[:, None], other=0.0)
        if WITH_SUM:
            zsum += (x0 + x1) + (x2 + x3)
        if LABEL:
            here = (label >= start + column) & (label < start + column + BLOCK)
            if tl.max(here.to(tl.int32), 0) > 0:  # few blocks hold a label
                at = (label - start - column)[:, None]
                x0 = tl.where(lane == at, MASK, x0)
                x1 = tl.where(lane + LANES == at, MASK, x1)
                x2 = tl.where(lane + 2 * LANES == at, MASK, x2)
                x3 = tl.where(lane + 3 * LANES == at, MASK, x3)
        m, rest, t = take_four(m, rest, t, x0, x1, x2, x3, power, WITH_T)
    for column in range(whole, stop, LANES):
        columns = column + lane
        x = tl.load(own + column, mask=live[:, None] & (columns < edge), other=0.0)
        if WITH_SUM:
            zsum += tl.where(columns < stop, x, 0.0)
        x = tl.where((columns < stop) & (start + columns != label[:, None]), x, MASK)
        before = m
        m, x = larger(m, x), tl.minimum(m, x)
        step = (before - m) * power
        grow = tl.exp2(step)
        if WITH_T:
            t = (t + rest * step) * grow
        rest, t = take(rest * grow, t, x, m, power, WITH_T)
    m, rest, t = of_lanes(m, rest, t, power, lane, LANES, WITH_T)
    m = tl.where(m <= EMPTY, EMPTY, m * late)
    cell = state + part.to(tl.int64) * n + rows
    field = tl.cast(n_parts, tl.int64) * n
    if not FIRST:
        m, rest, t = with_earlier(cell, field, live, m, rest, t, WITH_T)
    total = m
    if WITH_SUM:
        total = tl.sum(zsum, 1) * late
        if not FIRST:
            total += tl.load(cell + ZSUM * field, mask=live, other=0.0)
    store_sums(cell, field, live, m, rest, t, t, t, total, WITH_T, False, False, WITH_SUM)


@triton.jit
def with_earlier(cell, field, live, m, rest, t, WITH_T: tl.constexpr):
    """`online_softmax.merge` with what the slices before gave."""
    m1 = tl.load(cell + M * field, mask=live, other=EMPTY)
    rest1 = tl.load(cell + REST * field, mask=live, other=0.0)
    top = larger(m, m1)
    f, f1 = tl.exp(m - top), tl.exp(m1 - top)
    whole = tl.where(m1 >= m, rest1 + (1.0 + rest) * f, rest + (1.0 + rest1) * f1)
    total = whole
    if WITH_T:
        t1 = tl.load(cell + T * field, mask=live, other=0.0)
        total = times(f, t + (1.0 + rest) * (m - top)) + times(f1, t1 + (1.0 + rest1) * (m1 - top))
    return top, whole, total
