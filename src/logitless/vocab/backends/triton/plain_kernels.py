# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""The accumulation of a plain head's products: maximum, sum and entropy's sum alone, in few instructions an entry.

And of a frozen one, whose gradient needs p alone: maximum and sum, and the weights of the product with the head's rows.
A row is read in LANES columns, each of which has sums of its own until the row ends: nothing goes from thread to
thread on the way, and no thread waits for another. What it computes is the algebra of `algebra/online_softmax.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .accumulate_kernels import PER_TOKEN, REST, ZSUM, M, T, store_sums
from .maths import EMPTY, MASK, load_rows, ordered, times, without_label

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
def four_without_label(x0, x1, x2, x3, lane, label, LANES: tl.constexpr):
    """Four neighbouring blocks of entries with MASK at the label, counted from the first: few blocks hold one."""
    here = (label >= 0) & (label < 4 * LANES)
    if tl.max(here.to(tl.int32), 0) > 0:
        at = label[:, None]
        x0 = tl.where(lane == at, MASK, x0)
        x1 = tl.where(lane + LANES == at, MASK, x1)
        x2 = tl.where(lane + 2 * LANES == at, MASK, x2)
        x3 = tl.where(lane + 3 * LANES == at, MASK, x3)
    return x0, x1, x2, x3


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


@triton.jit
def store_peaks(peaks, x, rows, live, column, width, stop, GROUP: tl.constexpr):
    """The highest of every GROUP neighbours of a block that begins at `column`, -inf where its row has ended."""
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // GROUP
    groups = column // GROUP + tl.arange(0, GROUPS)
    highest = tl.max(tl.reshape(x, (ROWS, GROUPS, GROUP)), 2)
    at = peaks + rows[:, None] * tl.cdiv(width, GROUP) + groups[None, :]
    tl.store(at, ordered(highest), mask=live[:, None] & (groups * GROUP < stop)[None, :])


@triton.jit(do_not_specialize=["n", "n_parts"], do_not_specialize_on_alignment=[*PER_TOKEN, "peaks"])
def accumulate_plain_slice(
    raw,
    raw_stride,
    state,
    peaks,
    labels,
    row_scales,
    out0,
    out1,
    out0_stride,
    out1_stride,
    growth,
    n,
    width,
    padded,
    start,
    n_parts,
    part_width,
    FIRST: tl.constexpr,
    LABEL: tl.constexpr,
    WITH_T: tl.constexpr,
    WITH_SUM: tl.constexpr,
    BASES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `accumulate_slice`, of m, rest, t and zsum alone; a head without bias and softcap, its scale positive.

    BASES: reads the slice, in one part, once more, and writes the weights of p and of p·log p, relative to the
    new maximum. GROUP: `peaks` gets the highest of every GROUP neighbours, as they are.
    """
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
        if GROUP > 0:
            store_peaks(peaks, x0, rows, live, column, width, stop, GROUP)
            store_peaks(peaks, x1, rows, live, column + LANES, width, stop, GROUP)
            store_peaks(peaks, x2, rows, live, column + 2 * LANES, width, stop, GROUP)
            store_peaks(peaks, x3, rows, live, column + 3 * LANES, width, stop, GROUP)
        if LABEL:
            x0, x1, x2, x3 = four_without_label(x0, x1, x2, x3, lane, label - start - column, LANES)
        m, rest, t = take_four(m, rest, t, x0, x1, x2, x3, power, WITH_T)
    for column in range(whole, stop, LANES):
        columns = column + lane
        x = tl.load(own + column, mask=live[:, None] & (columns < edge), other=0.0)
        if WITH_SUM:
            zsum += tl.where(columns < stop, x, 0.0)
        if GROUP > 0:
            store_peaks(peaks, tl.where(columns < stop, x, -float("inf")), rows, live, column, width, stop, GROUP)
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
    before = tl.full((ROWS,), EMPTY, tl.float32)
    if not FIRST:
        before = tl.load(cell + M * field, mask=live, other=EMPTY)
        m, rest, t = with_earlier(cell, field, live, before, m, rest, t, WITH_T)
    total = m
    if WITH_SUM:
        total = tl.sum(zsum, 1) * late
        if not FIRST:
            total += tl.load(cell + ZSUM * field, mask=live, other=0.0)
    store_sums(cell, field, live, m, rest, t, t, t, total, WITH_T, False, False, WITH_SUM)
    if BASES:
        tl.store(growth + rows, tl.exp(before - m), mask=live)
        tl.store(growth + n + rows, before - m, mask=live)
        here = (label - start).to(tl.int32)
        for column in range(0, width, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            room = live[:, None] & (columns < padded)[None, :]  # what is past a row's end nobody reads
            x = tl.load(raw + rows[:, None] * raw_stride + columns[None, :], mask=room, other=0.0)
            tl.debug_barrier()  # the weights may lie over products that other threads have yet to read
            d = without_label(x * late[:, None], columns, here, column, BLOCK) - m[:, None]
            w = tl.exp2(d * LOG2E)
            tl.store(out0 + rows[:, None] * out0_stride + columns[None, :], w.to(out0.dtype.element_ty), mask=room)
            d = (w * d).to(out1.dtype.element_ty)
            tl.store(out1 + rows[:, None] * out1_stride + columns[None, :], d, mask=room)


@triton.jit
def with_earlier(cell, field, live, m1, m, rest, t, WITH_T: tl.constexpr):
    """`online_softmax.merge` with what the slices before gave, whose maximum is m1."""
    rest1 = tl.load(cell + REST * field, mask=live, other=0.0)
    top = larger(m, m1)
    f, f1 = tl.exp(m - top), tl.exp(m1 - top)
    whole = tl.where(m1 >= m, rest1 + (1.0 + rest) * f, rest + (1.0 + rest1) * f1)
    total = whole
    if WITH_T:
        t1 = tl.load(cell + T * field, mask=live, other=0.0)
        total = times(f, t + (1.0 + rest) * (m - top)) + times(f1, t1 + (1.0 + rest1) * (m1 - top))
    return top, whole, total


@triton.jit
def logits_of(own, columns, width, padded, live, late, RAGGED: tl.constexpr):
    """A block of logits, 0 where a row has ended; which of them it has, and which have room in memory."""
    room = live & (columns < padded)
    z = tl.load(own + columns, mask=room, other=0.0) * late
    inside = room
    if RAGGED:
        inside = columns < width
        z = tl.where(inside, z, 0.0)
    return z, inside, room


@triton.jit
def weigh(z, inside, level, m, most, rest):
    """A block's weights e^(z - level); each lane's maximum, its largest weight, and the sum of the others with them."""
    z = tl.where(inside, z, MASK)
    w = tl.exp2((z - level) * LOG2E)
    return w, larger(m, z), larger(most, w), rest + tl.minimum(most, w)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=[*PER_TOKEN, "levels"])
def weigh_plain_slice(
    raw,
    raw_stride,
    weights,
    weights_stride,
    state,
    levels,
    products,
    depth,
    labels,
    row_scales,
    n,
    width,
    padded,
    start,
    far,
    RAGGED: tl.constexpr,
    FIRST: tl.constexpr,
    LABEL: tl.constexpr,
    WITH_SUM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `accumulate_plain_slice` in one part, of m, rest and zsum alone; with all entries' e^(z - level) in `weights`.

    levels: (n,), a row's, which stays until an entry is more than `far` nats above it. The slice is then weighed once
    more, from its maximum, and what the slices before gave, the row of `products`, (n, depth), is scaled to it.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < n
    LANES: tl.constexpr = BLOCK // 4
    lane = tl.arange(0, LANES)[None, :]
    late = load_rows(row_scales, 0, n, rows, live)[:, None]
    label = tl.full((ROWS,), -1, tl.int32)
    if LABEL:
        label = tl.load(labels + rows, mask=live, other=-1).to(tl.int32) - start
    own = raw + rows[:, None] * raw_stride
    to = weights + rows[:, None] * weights_stride
    if FIRST:
        z = tl.load(own + lane, mask=live[:, None] & (lane < width), other=0.0) * late
        level = tl.max(tl.where((lane < width) & (lane != label[:, None]), z, EMPTY), 1)
    else:
        level = tl.load(levels + rows, mask=live, other=0.0)
    peak, others, total = level, level, level
    looks = 1
    while looks > 0:
        m = tl.full((ROWS, LANES), EMPTY, tl.float32)
        most = tl.zeros((ROWS, LANES), tl.float32)
        rest = tl.zeros((ROWS, LANES), tl.float32)
        zsum = tl.zeros((ROWS, LANES), tl.float32)
        base = level[:, None]
        for column in range(0, width, BLOCK):
            at = column + lane
            z0, in0, room0 = logits_of(own, at, width, padded, live[:, None], late, RAGGED)
            z1, in1, room1 = logits_of(own, at + LANES, width, padded, live[:, None], late, RAGGED)
            z2, in2, room2 = logits_of(own, at + 2 * LANES, width, padded, live[:, None], late, RAGGED)
            z3, in3, room3 = logits_of(own, at + 3 * LANES, width, padded, live[:, None], late, RAGGED)
            if WITH_SUM:
                zsum += (z0 + z1) + (z2 + z3)
            if LABEL:
                z0, z1, z2, z3 = four_without_label(z0, z1, z2, z3, lane, label - column, LANES)
            w0, m, most, rest = weigh(z0, in0, base, m, most, rest)
            w1, m, most, rest = weigh(z1, in1, base, m, most, rest)
            w2, m, most, rest = weigh(z2, in2, base, m, most, rest)
            w3, m, most, rest = weigh(z3, in3, base, m, most, rest)
            tl.store(to + at, w0.to(weights.dtype.element_ty), mask=room0)
            tl.store(to + at + LANES, w1.to(weights.dtype.element_ty), mask=room1)
            tl.store(to + at + 2 * LANES, w2.to(weights.dtype.element_ty), mask=room2)
            tl.store(to + at + 3 * LANES, w3.to(weights.dtype.element_ty), mask=room3)
        peak = tl.max(m, 1)
        first = tl.min(tl.where(m == peak[:, None], lane, LANES), 1)
        others = tl.sum(tl.where(lane == first[:, None], rest, rest + most), 1)
        if WITH_SUM:
            total = tl.sum(zsum, 1)
        rises = peak - level > far
        level = tl.where(rises, peak, level)
        looks = tl.max(rises.to(tl.int32), 0)
    cell = state + rows
    field = tl.cast(n, tl.int64)
    m0 = tl.full((ROWS,), EMPTY, tl.float32)
    rest0 = tl.full((ROWS,), -1.0, tl.float32)  # of no entry at all
    if not FIRST:
        m0 = tl.load(cell + M * field, mask=live, other=EMPTY)
        rest0 = tl.load(cell + REST * field, mask=live, other=0.0)
        if WITH_SUM:
            total += tl.load(cell + ZSUM * field, mask=live, other=0.0)
        before = tl.load(levels + rows, mask=live, other=0.0)
        if tl.max((level > before).to(tl.int32), 0) > 0:
            grow = tl.exp(before - level)[:, None]
            for column in range(0, depth, LANES):
                inside = live[:, None] & (column + lane < depth)
                at = products + rows[:, None] * depth + column + lane
                tl.store(at, tl.load(at, mask=inside, other=0.0) * grow, mask=inside)
        tl.debug_barrier()  # every thread has read the level that is written next
    top = larger(m0, peak)
    others *= tl.exp(level - top)
    rest = tl.where(peak >= m0, others + (1.0 + rest0) * tl.exp(m0 - top), rest0 + others + tl.exp(peak - top))
    tl.store(levels + rows, level, mask=live)
    store_sums(cell, field, live, top, rest, rest, rest, rest, total, False, False, False, WITH_SUM)
