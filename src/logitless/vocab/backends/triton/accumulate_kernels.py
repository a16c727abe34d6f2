# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""The kernels that accumulate: a slice of products, products and sums in one, partial accumulations into one.

A program takes a block of ROWS tokens and walks over their columns BLOCK at a time. What it computes is the algebra of
`algebra/online_softmax.py`; it owns what it writes, so nothing is atomic and results repeat.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import (
    EMPTY,
    FAR,
    MASK,
    TAKEN,
    expm1,
    finite,
    keys_of,
    load_rows,
    logits,
    minus_e,
    ordered,
    times,
    without_label,
)

# The rows of a running accumulation, (FIELDS, parts, n); those from M_REF on only where there is a reference.
FIELDS = ("m", "rest", "t", "r", "above", "zsum", "m_ref", "s_ref", "near", "shift", "a", "b", "a_ref")
ALONE = FIELDS.index("m_ref")
M, REST, T, R, ABOVE, ZSUM, M_REF, S_REF, NEAR, SHIFT, A, B, A_REF = map(tl.constexpr, range(len(FIELDS)))
PER_TOKEN = ("labels", "label_logits", "row_scales", "ref_row_scales")  # read number by number, wherever they begin
BASES = {"": 0, "p": 1, "plogp": 2, "pD": 3, "p2": 4, "q": 5}


@triton.jit
def keep_best(best, keys):
    """The best entries so far with those of a block that beat them: usually none, so usually one comparison."""
    top = tl.max(keys, 1)
    floor = tl.min(best, 1)
    more = tl.max((top > floor).to(tl.int32), 0)
    while more > 0:
        better = (top > floor)[:, None]
        best = tl.where(better & (best == floor[:, None]), top[:, None], best)
        keys = tl.where(keys == top[:, None], TAKEN, keys)
        top = tl.max(keys, 1)
        floor = tl.min(best, 1)
        more = tl.max((top > floor).to(tl.int32), 0)
    return best


@triton.jit
def add_block(x, m, rest, t, r, above, label_logit, WITH_T: tl.constexpr, WITH_R: tl.constexpr, RANK: tl.constexpr):
    """Accumulates a block of logits, MASK where one does not count, into the sums over the policy alone.

    Also returns the weights e^(x-m), the old sums' factor, and its logarithm.
    """
    if RANK:
        above += tl.sum((x > label_logit[:, None]).to(x.dtype), 1)
    peak = tl.max(x, 1)
    top = tl.maximum(m, peak)
    step = m - top
    grow = tl.exp(step)
    d = x - top[:, None]
    w = tl.exp(d)
    highest = x == peak[:, None]
    others = tl.sum(tl.where(highest, 0.0, w), 1)  # apart from the highest, whose 1 would swallow their digits
    ties = tl.sum(highest.to(x.dtype), 1)
    if WITH_T:
        t = (t + (1.0 + rest) * step) * grow + tl.sum(w * d, 1)
    if WITH_R:
        r = r * grow * grow + tl.sum(w * w, 1)
    newest = peak > m
    rest = tl.where(newest, others + (ties - 1.0) + (1.0 + rest) * grow, rest + others + ties * tl.exp(peak - top))
    return w, grow, step, top, rest, t, r, above


@triton.jit
def weighted(w, gap, INFINITE: tl.constexpr):
    """w·gap, 0 where w is 0 whatever the gap is."""
    if INFINITE:
        return times(w, gap)
    return w * gap


@triton.jit
def gaps(x, z_ref, shift, valid, INFINITE: tl.constexpr):
    """z_ref - z + d0; where logits can be -inf, 0 where both are or nothing is to be seen."""
    if INFINITE:
        return minus_e(x, z_ref, shift, valid)
    return (z_ref - x) + shift[:, None]


@triton.jit
def nearest(x, z_ref, valid, near, shift):
    """`near` and `shift` with a block: max (z + z_ref), and z - z_ref of that entry. x, z_ref: without -inf."""
    both = tl.where(valid, x + z_ref, MASK)
    top = tl.max(both, 1)
    own = tl.max(tl.where(both == top[:, None], x - z_ref, -float("inf")), 1)
    return tl.maximum(near, top), tl.where(top > near, own, shift)


@triton.jit
def moved_b(b, s, s_ref, grow, step, down, up):
    """`online_softmax.moved_b`: s = Σw, grow = e^down, up = m_ref - m + d0 with the new m and d0."""
    near = grow * (b * tl.exp(-step) + s * expm1(-step))
    keeps_digits = (tl.abs(step) < FAR) & (down > -FAR) & (b > -0.5 * s)
    return tl.where(keeps_digits, near, s_ref * tl.exp(up) - s * grow)


@triton.jit
def add_reference(
    gap, z_ref, w, s, grow, step, moved, m, shift, m_ref, s_ref, a, b, a_ref,
    INFINITE: tl.constexpr, WITH_QE: tl.constexpr,
):  # fmt: skip
    """Accumulates a block into the sums of KL.

    s: Σw before the block; m, shift: with it; step, moved: these before it, less these with it.
    """
    a += s * moved
    b = moved_b(b, s, s_ref, grow, moved, step, (m_ref - m) + shift)
    a_ref += s_ref * moved
    a = times(grow, a) - tl.sum(weighted(w, gap, INFINITE), 1)
    top = tl.maximum(m_ref, tl.max(z_ref, 1))
    grow_ref = tl.exp(m_ref - top)
    w_ref = tl.exp(z_ref - top[:, None])
    s_ref = s_ref * grow_ref + tl.sum(w_ref, 1)
    grown = w_ref * tl.exp((top - m) + shift)[:, None]  # w·e^(-e), where a factor would overflow
    b += tl.sum(tl.where(tl.abs(gap) < 1.0, expm1(gap) * w, grown - w), 1)
    if WITH_QE:
        a_ref = times(grow_ref, a_ref) - tl.sum(weighted(w_ref, gap, INFINITE), 1)
    return top, s_ref, a, b, a_ref


@triton.jit
def store_sums(
    cell,
    field,
    live,
    m,
    rest,
    t,
    r,
    above,
    zsum,
    WITH_T: tl.constexpr,
    WITH_R: tl.constexpr,
    RANK: tl.constexpr,
    WITH_SUM: tl.constexpr,
):
    """The sums over the policy alone into a running accumulation; `field` lies between two of its rows."""
    tl.store(cell + M * field, m, mask=live)
    tl.store(cell + REST * field, rest, mask=live)
    if WITH_T:
        tl.store(cell + T * field, t, mask=live)
    if WITH_R:
        tl.store(cell + R * field, r, mask=live)
    if RANK:
        tl.store(cell + ABOVE * field, above, mask=live)
    if WITH_SUM:
        tl.store(cell + ZSUM * field, zsum, mask=live)


@triton.jit
def store_reference(cell, field, live, m_ref, s_ref, near, shift, a, b, a_ref, WITH_QE: tl.constexpr):
    """The sums of KL into a running accumulation, as `store_sums` has the others."""
    tl.store(cell + M_REF * field, m_ref, mask=live)
    tl.store(cell + S_REF * field, s_ref, mask=live)
    tl.store(cell + NEAR * field, near, mask=live)
    tl.store(cell + SHIFT * field, shift, mask=live)
    tl.store(cell + A * field, a, mask=live)
    tl.store(cell + B * field, b, mask=live)
    if WITH_QE:
        tl.store(cell + A_REF * field, a_ref, mask=live)


@triton.jit
def load_slice(at, room, seen, RAGGED: tl.constexpr):
    """Numbers of a slice, 0 where rows have ended."""
    x = tl.load(at, mask=room, other=0.0)
    if RAGGED:
        x = tl.where(seen, x, 0.0)
    return x


@triton.jit
def basis_weights(BASIS: tl.constexpr, w, d, gap, w_ref, INFINITE: tl.constexpr):
    """What multiplies W in a basis' product."""
    out = w
    if BASIS == 2:
        out = w * d
    elif BASIS == 3:
        out = -weighted(w, gap, INFINITE)
    elif BASIS == 4:
        out = w * w
    elif BASIS == 5:
        out = w_ref
    return out


@triton.jit(do_not_specialize=["n", "n_parts"], do_not_specialize_on_alignment=PER_TOKEN)
def accumulate_slice(
    raw,
    ref_raw,
    raw_stride,
    ref_stride,
    state,
    best_keys,
    labels,
    label_logits,
    row_scales,
    ref_row_scales,
    bias,
    ref_bias,
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
    RAGGED: tl.constexpr,
    FIRST: tl.constexpr,
    LABEL: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    REF: tl.constexpr,
    REF_BIAS: tl.constexpr,
    REF_CAP: tl.constexpr,
    WITH_T: tl.constexpr,
    WITH_R: tl.constexpr,
    RANK: tl.constexpr,
    WITH_SUM: tl.constexpr,
    WITH_QE: tl.constexpr,
    WRITE_BACK: tl.constexpr,
    BEST: tl.constexpr,
    TOP: tl.constexpr,
    BASIS0: tl.constexpr,
    BASIS1: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Takes one slice of the head's products into the running accumulations of (token, part of the slice).

    WRITE_BACK: leave final logits in place of the products. BASIS0, BASIS1: read the slice, in one part, once more, and
    write these bases' weights, relative to the new maximum, the first ones over the products or elsewhere; and the
    growth of the maximum.
    padded: the entries that a row has room for, RAGGED where these are more than `width`.
    GROUP: instead of the best entries themselves `best_keys` gets the highest of every GROUP neighbours, (n, groups).
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    live = rows < n
    dtype = raw.dtype.element_ty
    zero = tl.zeros((ROWS,), dtype)
    m, rest, t, r, above, zsum = zero + EMPTY, zero, zero, zero, zero, zero
    m_ref, s_ref, near, shift, a, b, a_ref = zero + EMPTY, zero, zero + EMPTY, zero, zero, zero, zero
    best = tl.zeros((ROWS, TOP), tl.int64)
    cell = state + part.to(tl.int64) * n + rows
    field = tl.cast(n_parts, tl.int64) * n
    places = best_keys + (rows[:, None] * n_parts + part) * TOP + tl.arange(0, TOP)[None, :]
    if BEST > 0:
        empty = TAKEN + 1 + tl.arange(0, TOP).to(tl.int64)
        best += tl.where(tl.arange(0, TOP) < BEST, empty, 0x7FFFFFFFFFFFFFFF)[None, :]
    if not FIRST:
        m = tl.load(cell + M * field, mask=live, other=EMPTY)
        rest = tl.load(cell + REST * field, mask=live, other=0.0)
        if WITH_T:
            t = tl.load(cell + T * field, mask=live, other=0.0)
        if WITH_R:
            r = tl.load(cell + R * field, mask=live, other=0.0)
        if RANK:
            above = tl.load(cell + ABOVE * field, mask=live, other=0.0)
        if WITH_SUM:
            zsum = tl.load(cell + ZSUM * field, mask=live, other=0.0)
        if REF:
            m_ref = tl.load(cell + M_REF * field, mask=live, other=EMPTY)
            s_ref = tl.load(cell + S_REF * field, mask=live, other=0.0)
            near = tl.load(cell + NEAR * field, mask=live, other=EMPTY)
            shift = tl.load(cell + SHIFT * field, mask=live, other=0.0)
            a = tl.load(cell + A * field, mask=live, other=0.0)
            b = tl.load(cell + B * field, mask=live, other=0.0)
            if WITH_QE:
                a_ref = tl.load(cell + A_REF * field, mask=live, other=0.0)
        if BEST > 0:
            best = tl.load(places, mask=live[:, None], other=0)
    label = tl.full((ROWS,), -1, tl.int64)
    label_logit = zero
    if LABEL:
        label = tl.load(labels + rows, mask=live, other=-1)
        label_logit = tl.maximum(tl.load(label_logits + rows, mask=live, other=0.0), MASK)
    m_before, m_ref_before, shift_before = m, m_ref, shift
    here = (label - start).to(tl.int32)  # its column of the slice
    INFINITE: tl.constexpr = BIAS or REF_BIAS
    begin = part * part_width
    stop = tl.minimum(begin + part_width, width)
    edge = tl.minimum(begin + part_width, padded)  # whole vectors are read and written where rows end within one
    for column in range(begin, stop, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        ids = start + columns
        inside = columns < stop
        seen = live[:, None] & inside[None, :]
        room = live[:, None] & (columns < edge)[None, :]
        at = raw + rows[:, None] * raw_stride + columns[None, :]
        x = load_slice(at, room, seen, RAGGED)
        x = logits(x, row_scales, bias, n, rows, live, ids, inside, BIAS, CAP, True)
        if WITH_SUM:
            zsum += tl.sum(tl.where(seen, x, 0.0), 1)
        if BEST > 0:
            best = keep_best(best, tl.where(seen, keys_of(x, ids), TAKEN))
        if GROUP > 0:
            groups = column // GROUP + tl.arange(0, BLOCK // GROUP)
            peaks = tl.max(tl.reshape(tl.where(seen, x, -float("inf")), (ROWS, BLOCK // GROUP, GROUP)), 2)
            at_group = best_keys + rows[:, None] * tl.cdiv(width, GROUP) + groups[None, :]
            tl.store(at_group, ordered(peaks), mask=live[:, None] & (groups * GROUP < stop)[None, :])
        valid = seen & (columns[None, :] != here[:, None])
        gap = x
        z_ref = x
        moved = zero
        if REF:
            at_ref = ref_raw + rows[:, None] * ref_stride + columns[None, :]
            z_ref = load_slice(at_ref, room, seen, RAGGED)
            z_ref = logits(z_ref, ref_row_scales, ref_bias, n, rows, live, ids, inside, REF_BIAS, REF_CAP, True)
            before = shift
            if INFINITE:
                near, shift = nearest(finite(x), finite(z_ref), valid, near, shift)
            else:
                near, shift = nearest(x, z_ref, valid, near, shift)
            moved = before - shift
            gap = gaps(x, z_ref, shift, valid, INFINITE)
        if BIAS:
            x = finite(x)
        if REF_BIAS:
            z_ref = finite(z_ref)
        if WRITE_BACK:
            tl.store(at, x, mask=room)
            if REF:
                tl.store(at_ref, z_ref, mask=room)
        x = tl.where(valid, x, MASK)
        s = 1.0 + rest
        w, grow, step, m, rest, t, r, above = add_block(x, m, rest, t, r, above, label_logit, WITH_T, WITH_R, RANK)
        if REF:
            z_ref = tl.where(valid, z_ref, MASK)
            m_ref, s_ref, a, b, a_ref = add_reference(
                gap, z_ref, w, s, grow, step, moved, m, shift, m_ref, s_ref, a, b, a_ref, INFINITE, WITH_QE
            )
    store_sums(cell, field, live, m, rest, t, r, above, zsum, WITH_T, WITH_R, RANK, WITH_SUM)
    if REF:
        store_reference(cell, field, live, m_ref, s_ref, near, shift, a, b, a_ref, WITH_QE)
    if BASIS0 > 0:
        tl.store(growth + rows, tl.exp(m_before - m), mask=live)
        tl.store(growth + n + rows, m_before - m, mask=live)
        tl.store(growth + 2 * n + rows, tl.exp(m_ref_before - m_ref), mask=live)
        tl.store(growth + 3 * n + rows, shift_before - shift, mask=live)
        for column in range(0, width, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            ids = start + columns
            inside = columns < width
            room = live[:, None] & (columns < padded)[None, :]  # what is past a row's end nobody reads
            x = tl.load(raw + rows[:, None] * raw_stride + columns[None, :], mask=room, other=0.0)
            z_ref = x
            if REF:
                z_ref = tl.load(ref_raw + rows[:, None] * ref_stride + columns[None, :], mask=room, other=0.0)
            tl.debug_barrier()  # the weights may lie over products that other threads have yet to read
            x = logits(x, row_scales, bias, n, rows, live, ids, inside, BIAS, CAP, not WRITE_BACK)
            gap = x
            w_ref = x
            if REF:
                z_ref = logits(
                    z_ref, ref_row_scales, ref_bias, n, rows, live, ids, inside, REF_BIAS, REF_CAP, not WRITE_BACK
                )
                gap = gaps(x, z_ref, shift, room, INFINITE)
                if REF_BIAS:
                    z_ref = finite(z_ref)
                w_ref = tl.exp(without_label(z_ref, columns, here, column, BLOCK) - m_ref[:, None])
            if BIAS:
                x = finite(x)
            flat = tl.full((1, 1), 1.0, dtype)
            if CAP:
                share = x / load_rows(row_scales, 2, n, rows, live)[:, None]
                flat = 1.0 - share * share
            d = without_label(x, columns, here, column, BLOCK) - m[:, None]
            w = tl.exp(d)
            w0 = basis_weights(BASIS0, w, d, gap, w_ref, INFINITE) * flat
            tl.store(out0 + rows[:, None] * out0_stride + columns[None, :], w0.to(out0.dtype.element_ty), mask=room)
            if BASIS1 > 0:
                w1 = basis_weights(BASIS1, w, d, gap, w_ref, INFINITE) * flat
                tl.store(out1 + rows[:, None] * out1_stride + columns[None, :], w1.to(out1.dtype.element_ty), mask=room)
    if BEST > 0:
        tl.store(places, best, mask=live[:, None])


@triton.jit(do_not_specialize=["n", "n_parts", "n_out", "group"])
def merge_parts(
    state,
    out,
    n,
    n_parts,
    n_out,
    group,
    WITH_T: tl.constexpr,
    WITH_R: tl.constexpr,
    RANK: tl.constexpr,
    WITH_SUM: tl.constexpr,
    REF: tl.constexpr,
    WITH_QE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge groups of `group` ≤ PARTS partial accumulations of each token: (fields, parts, n) -> (fields, out, n)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    into = tl.program_id(1).to(tl.int64)
    parts = into * group + tl.arange(0, PARTS)
    there = (tl.arange(0, PARTS) < group) & (parts < n_parts)
    live = rows < n
    seen = there[:, None] & live[None, :]
    cell = state + parts[:, None] * n + rows[None, :]
    field = tl.cast(n_parts, tl.int64) * n
    to = out + into * n + rows
    jump = tl.cast(n_out, tl.int64) * n
    ms = tl.load(cell + M * field, mask=seen, other=2 * EMPTY)
    rests = tl.load(cell + REST * field, mask=seen, other=0.0)
    m = tl.max(ms, 0)
    step = ms - m[None, :]
    f = tl.exp(step)
    place = tl.arange(0, PARTS)[:, None] + tl.zeros((PARTS, ROWS), tl.int32)
    first = tl.min(tl.where(ms == m[None, :], place, PARTS), 0)
    rest = tl.sum(tl.where(place == first[None, :], rests, (1.0 + rests) * f), 0)
    tl.store(to + M * jump, m, mask=live)
    tl.store(to + REST * jump, rest, mask=live)
    if WITH_T:
        t = tl.load(cell + T * field, mask=seen, other=0.0)
        tl.store(to + T * jump, tl.sum(times(f, t + (1.0 + rests) * step), 0), mask=live)
    if WITH_R:
        r = tl.load(cell + R * field, mask=seen, other=0.0)
        tl.store(to + R * jump, tl.sum(f * f * r, 0), mask=live)
    if RANK:
        tl.store(to + ABOVE * jump, tl.sum(tl.load(cell + ABOVE * field, mask=seen, other=0.0), 0), mask=live)
    if WITH_SUM:
        tl.store(to + ZSUM * jump, tl.sum(tl.load(cell + ZSUM * field, mask=seen, other=0.0), 0), mask=live)
    if REF:
        shifts = tl.load(cell + SHIFT * field, mask=seen, other=0.0)
        nears = tl.load(cell + NEAR * field, mask=seen, other=2 * EMPTY)
        near = tl.max(nears, 0)
        best = tl.min(tl.where(nears == near[None, :], place, PARTS), 0)
        shift = tl.sum(tl.where(place == best[None, :], shifts, 0.0), 0)
        moved = shifts - shift[None, :]
        mr = tl.load(cell + M_REF * field, mask=seen, other=2 * EMPTY)
        sr = tl.load(cell + S_REF * field, mask=seen, other=0.0)
        m_ref = tl.max(mr, 0)
        g = tl.exp(mr - m_ref[None, :])
        s = 1.0 + rests
        aa = tl.load(cell + A * field, mask=seen, other=0.0) + s * moved
        bb = tl.load(cell + B * field, mask=seen, other=0.0)
        bb = moved_b(bb, s, sr, f, moved, step, (mr - m[None, :]) + shift[None, :])
        tl.store(to + NEAR * jump, near, mask=live)
        tl.store(to + SHIFT * jump, shift, mask=live)
        tl.store(to + M_REF * jump, m_ref, mask=live)
        tl.store(to + S_REF * jump, tl.sum(g * sr, 0), mask=live)
        tl.store(to + A * jump, tl.sum(times(f, aa), 0), mask=live)
        tl.store(to + B * jump, tl.sum(bb, 0), mask=live)
        if WITH_QE:
            qq = tl.load(cell + A_REF * field, mask=seen, other=0.0) + sr * moved
            tl.store(to + A_REF * jump, tl.sum(times(g, qq), 0), mask=live)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["factors", "steps"])
def rescale(x, gains, factors, steps, n, width, GAINS: tl.constexpr, SQUARED: tl.constexpr, BLOCK: tl.constexpr):
    """A token's row of a product, (n, width), times its maximum's growth: most slices have no new maximum.

    factors: (n,). GAINS: with it another product that first gains `steps` times this one: p·log p as the maximum
    moves, p·D as the shift does.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row)
    step = 0.0
    if GAINS:
        step = tl.load(steps + row)
    if (factor != 1.0) | (step != 0.0):
        if SQUARED:
            factor = factor * factor
        for column in range(0, width, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            inside = columns < width
            p = tl.load(x + row * width + columns, mask=inside, other=0.0)
            tl.store(x + row * width + columns, times(factor, p), mask=inside)
            if GAINS:
                y = tl.load(gains + row * width + columns, mask=inside, other=0.0)
                tl.store(gains + row * width + columns, times(factor, y + p * step), mask=inside)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_TOKEN)
def accumulate_products(
    tokens,
    entries,
    tokens_stride,
    entries_stride,
    state,
    labels,
    label_logits,
    row_scales,
    bias,
    n,
    width,
    depth,
    n_parts,
    LABEL: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    WITH_T: tl.constexpr,
    WITH_R: tl.constexpr,
    RANK: tl.constexpr,
    WITH_SUM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """Products and sums in one: GROUP blocks of entries for a block of tokens, whose logits never leave the chip.

    The programs of one part are neighbours, so that its entries stay in the L2 cache.
    """
    row_blocks = tl.cdiv(n, ROWS)
    part = tl.program_id(0) // row_blocks
    rows = (tl.program_id(0) % row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < n
    zero = tl.zeros((ROWS,), tl.float32)
    m, rest, t, r, above, zsum = zero + EMPTY, zero, zero, zero, zero, zero
    label = tl.full((ROWS,), -1, tl.int64)
    label_logit = zero
    if LABEL:
        label = tl.load(labels + rows, mask=live, other=-1)
        label_logit = tl.maximum(tl.load(label_logits + rows, mask=live, other=0.0), MASK)
    inner = tl.arange(0, INNER)
    for j in range(GROUP):
        ids = (part * GROUP + j) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < width
        x_at = tokens + rows[:, None] * tokens_stride + inner[None, :]
        w_at = entries + ids.to(tl.int64)[None, :] * entries_stride + inner[:, None]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for k in range(0, depth, INNER):
            deep = k + inner < depth
            x = tl.load(x_at + k, mask=live[:, None] & deep[None, :], other=0.0)
            w = tl.load(w_at + k, mask=deep[:, None] & inside[None, :], other=0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
        z = logits(total, row_scales, bias, n, rows, live, ids, inside, BIAS, CAP, True)
        seen = live[:, None] & inside[None, :]
        if WITH_SUM:
            zsum += tl.sum(tl.where(seen, z, 0.0), 1)
        valid = seen & (ids[None, :] != label[:, None])
        z = tl.where(valid, finite(z), MASK)
        _, _, _, m, rest, t, r, above = add_block(z, m, rest, t, r, above, label_logit, WITH_T, WITH_R, RANK)
    cell = state + part.to(tl.int64) * n + rows
    field = tl.cast(n_parts, tl.int64) * n
    store_sums(cell, field, live, m, rest, t, r, above, zsum, WITH_T, WITH_R, RANK, WITH_SUM)
