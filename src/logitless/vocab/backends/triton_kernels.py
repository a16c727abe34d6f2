# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""The pass's kernels: fold a slice of logits, merge partial folds, unfold the gradient, jsd's second look.

Every kernel takes a block of ROWS tokens and walks over their columns BLOCK at a time. What it computes is the algebra
of `algebra/fold.py` and `algebra/stats.py`; a program owns what it writes, so nothing is atomic and results repeat.
Written for CUDA and for Triton's interpreter alike: no function of a device library.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...algebra import fold as algebra

MASK = tl.constexpr(algebra.MASK)
EMPTY = tl.constexpr(algebra.EMPTY)
TAKEN = tl.constexpr(-(2**63) + 1)  # below the key of every entry, and of every empty place
# The rows of a running fold, (FIELDS, parts, n); those from M_REF on only where there is a reference.
FIELDS = ("m", "rest", "t", "r", "above", "zsum", "m_ref", "s_ref", "shift", "a", "b", "a_ref")
ALONE = FIELDS.index("m_ref")
M, REST, T, R, ABOVE, ZSUM, M_REF, S_REF, SHIFT, A, B, A_REF = map(tl.constexpr, range(len(FIELDS)))
# The rows of a kernel's totals and of its slopes.
TOTALS = ("m", "log_s", "shift", "log_ratio", "m_ref", "log_s_ref")
SLOPES = ("p", "plogp", "pD", "pM", "p2", "q", "one")
BASES = {"": 0, "p": 1, "plogp": 2, "pD": 3, "p2": 4, "q": 5}


@triton.jit
def expm1(x):
    """e^x - 1, its digits kept near 0."""
    TERMS: tl.constexpr = 14 if x.dtype == tl.float64 else 7
    small = tl.full(x.shape, 1.0, x.dtype)
    for i in tl.static_range(TERMS - 1):
        small = 1.0 + small * x * (1.0 / (TERMS - i))
    return tl.where(tl.abs(x) < 0.35, small * x, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x), its digits kept near 0: 2·artanh(x / (2 + x))."""
    TERMS: tl.constexpr = 11 if x.dtype == tl.float64 else 5
    s = x / (2.0 + x)
    series = tl.zeros(x.shape, x.dtype)
    for i in tl.static_range(TERMS):
        series = series * s * s + 1.0 / (2 * (TERMS - i) - 1)
    return tl.where(tl.abs(x) < 0.3, 2.0 * s * series, tl.log(1.0 + x))


@triton.jit
def tanh(x):
    e = expm1(-2.0 * tl.abs(x))
    y = -e / (e + 2.0)
    return tl.where(x < 0, -y, y)


@triton.jit
def load_rows(x, field, n, rows, live):
    """Row `field` of a (fields, n) array at some tokens."""
    return tl.load(x + field * n + rows, mask=live, other=0.0)


@triton.jit
def logits(raw, heat, bias, n, rows, live, ids, inside, BIAS: tl.constexpr, CAP: tl.constexpr, RAW: tl.constexpr):
    """z from the head's products: outer·tanh(late·raw + inner·bias), or without the tanh; as it is unless RAW."""
    z = raw
    if RAW:
        z = z * load_rows(heat, 0, n, rows, live)[:, None]
        if BIAS:
            b = tl.load(bias + ids, mask=inside, other=0.0)
            z += b[None, :] * load_rows(heat, 1, n, rows, live)[:, None]
        if CAP:
            z = tanh(z) * load_rows(heat, 2, n, rows, live)[:, None]
    return z


@triton.jit
def minus_e(z, z_ref, shift, seen):
    """z_ref - z + d0, 0 where both are -inf or nothing is to be seen."""
    gap = z_ref - z
    same = (z_ref == z) | (seen == 0)
    return tl.where(same & ((gap != 0) | (seen == 0)), 0.0, gap + shift[:, None])


@triton.jit
def times(weight, x):
    """weight·x with 0·(±inf) = 0."""
    return tl.where(weight == 0, 0.0, weight * x)


@triton.jit
def keys_of(z, ids):
    """Whole numbers in the order of the logits, the lower id first among equal ones."""
    bits = (z + 0.0).to(tl.float32).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))[None, :]


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
    """Fold a block of logits with MASK for what does not count into the sums over the policy alone.

    Also returns the weights e^(x-m), the old weights' factor, and its logarithm.
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
    return w, d, grow, step, top, rest, t, r, above


@triton.jit
def add_reference(gap, z_ref, w, grow, m_ref, s_ref, a, b, a_ref, WITH_QE: tl.constexpr):
    """Fold a block into the sums of KL; also returns the reference's weights and their old ones' factor."""
    a = times(grow, a) - tl.sum(times(w, gap), 1)
    b = b * grow + tl.sum(expm1(gap) * w, 1)
    top = tl.maximum(m_ref, tl.max(z_ref, 1))
    grow_ref = tl.exp(m_ref - top)
    w_ref = tl.exp(z_ref - top[:, None])
    s_ref = s_ref * grow_ref + tl.sum(w_ref, 1)
    if WITH_QE:
        a_ref = times(grow_ref, a_ref) - tl.sum(times(w_ref, gap), 1)
    return w_ref, grow_ref, top, s_ref, a, b, a_ref


@triton.jit
def basis_weights(BASIS: tl.constexpr, w, d, gap, w_ref):
    """What multiplies W in a basis' product."""
    out = w
    if BASIS == 2:
        out = w * d
    elif BASIS == 3:
        out = -times(w, gap)
    elif BASIS == 4:
        out = w * w
    elif BASIS == 5:
        out = w_ref
    return out


@triton.jit
def fold_slice(
    raw, ref_raw, raw_stride, ref_stride, state, best_keys, labels, label_logits, heat, ref_heat, bias, ref_bias,
    out0, out1, out0_stride, out1_stride, growth, n, width, start, n_parts, part_width,
    FIRST: tl.constexpr, LABEL: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, REF: tl.constexpr,
    REF_BIAS: tl.constexpr, REF_CAP: tl.constexpr, WITH_T: tl.constexpr, WITH_R: tl.constexpr, RANK: tl.constexpr,
    WITH_SUM: tl.constexpr, WITH_QE: tl.constexpr, WRITE_BACK: tl.constexpr, BEST: tl.constexpr, TOP: tl.constexpr,
    BASIS0: tl.constexpr, BASIS1: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold one slice of the head's products into the running folds of (token, part of the slice).

    WRITE_BACK: leave final logits in place of the products. BASIS0, BASIS1: write these bases' weights, relative to
    the new maximum, over the products or elsewhere, and the growth of the maximum; the block then holds whole rows.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    live = rows < n
    dtype = raw.dtype.element_ty
    zero = tl.zeros((ROWS,), dtype)
    m, rest, t, r, above, zsum = zero + EMPTY, zero, zero, zero, zero, zero
    m_ref, s_ref, shift, a, b, a_ref = zero + EMPTY, zero, zero, zero, zero, zero
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
    begin = part * part_width
    stop = tl.minimum(begin + part_width, width)
    for column in range(begin, stop, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        ids = start + columns
        inside = columns < stop
        seen = live[:, None] & inside[None, :]
        at = raw + rows[:, None] * raw_stride + columns[None, :]
        x = tl.load(at, mask=seen, other=0.0)
        x = logits(x, heat, bias, n, rows, live, ids, inside, BIAS, CAP, True)
        if WITH_SUM:
            zsum += tl.sum(tl.where(seen, x, 0.0), 1)
        if BEST > 0:
            best = keep_best(best, tl.where(seen, keys_of(x, ids), TAKEN))
        counted = seen & (ids[None, :] != label[:, None])
        gap = x
        z_ref = x
        if REF:
            at_ref = ref_raw + rows[:, None] * ref_stride + columns[None, :]
            z_ref = tl.load(at_ref, mask=seen, other=0.0)
            z_ref = logits(z_ref, ref_heat, ref_bias, n, rows, live, ids, inside, REF_BIAS, REF_CAP, True)
            if FIRST:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
                if column == begin:
                    near = seen & (x > MASK) & (z_ref > MASK)
                    mean = tl.sum(tl.where(near, x - z_ref, 0.0), 1)
                    shift = mean / tl.maximum(tl.sum(near.to(dtype), 1), 1.0)
            gap = minus_e(x, z_ref, shift, counted)
            z_ref = tl.maximum(z_ref, MASK)
        x = tl.maximum(x, MASK)
        if WRITE_BACK:
            tl.store(at, x, mask=seen)
            if REF:
                tl.store(at_ref, z_ref, mask=seen)
        final = x
        x = tl.where(counted, x, MASK)
        w, d, grow, step, m, rest, t, r, above = add_block(x, m, rest, t, r, above, label_logit, WITH_T, WITH_R, RANK)
        w_ref = w
        grow_ref = grow
        if REF:
            z_ref = tl.where(counted, z_ref, MASK)
            w_ref, grow_ref, m_ref, s_ref, a, b, a_ref = add_reference(
                gap, z_ref, w, grow, m_ref, s_ref, a, b, a_ref, WITH_QE
            )
        if BASIS0 > 0:
            flat = tl.zeros((ROWS, BLOCK), dtype) + 1.0
            if CAP:
                share = final / load_rows(heat, 2, n, rows, live)[:, None]
                flat = 1.0 - share * share
            tl.debug_barrier()  # the weights may lie over products that other threads have yet to read
            at0 = out0 + rows[:, None] * out0_stride + columns[None, :]
            tl.store(at0, (basis_weights(BASIS0, w, d, gap, w_ref) * flat).to(out0.dtype.element_ty), mask=seen)
            if BASIS1 > 0:
                at1 = out1 + rows[:, None] * out1_stride + columns[None, :]
                tl.store(at1, (basis_weights(BASIS1, w, d, gap, w_ref) * flat).to(out1.dtype.element_ty), mask=seen)
            tl.store(growth + rows, grow, mask=live)
            tl.store(growth + n + rows, step, mask=live)
            tl.store(growth + 2 * n + rows, grow_ref, mask=live)
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
    if REF:
        tl.store(cell + M_REF * field, m_ref, mask=live)
        tl.store(cell + S_REF * field, s_ref, mask=live)
        tl.store(cell + SHIFT * field, shift, mask=live)
        tl.store(cell + A * field, a, mask=live)
        tl.store(cell + B * field, b, mask=live)
        if WITH_QE:
            tl.store(cell + A_REF * field, a_ref, mask=live)
    if BEST > 0:
        tl.store(places, best, mask=live[:, None])


@triton.jit
def merge_parts(
    state, out, n, n_parts, n_out, group,
    WITH_T: tl.constexpr, WITH_R: tl.constexpr, RANK: tl.constexpr, WITH_SUM: tl.constexpr, REF: tl.constexpr,
    WITH_QE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge groups of `group` ≤ PARTS partial folds of each token into one: (fields, parts, n) -> (fields, out, n)."""
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
        shift = tl.sum(tl.where(place == first[None, :], shifts, 0.0), 0)
        moved = tl.where(seen, shifts - shift[None, :], 0.0)
        mr = tl.load(cell + M_REF * field, mask=seen, other=2 * EMPTY)
        sr = tl.load(cell + S_REF * field, mask=seen, other=0.0)
        m_ref = tl.max(mr, 0)
        g = tl.exp(mr - m_ref[None, :])
        s = 1.0 + rests
        aa = tl.load(cell + A * field, mask=seen, other=0.0) + s * moved
        bb = tl.load(cell + B * field, mask=seen, other=0.0) * tl.exp(-moved) + s * expm1(-moved)
        tl.store(to + SHIFT * jump, shift, mask=live)
        tl.store(to + M_REF * jump, m_ref, mask=live)
        tl.store(to + S_REF * jump, tl.sum(g * sr, 0), mask=live)
        tl.store(to + A * jump, tl.sum(times(f, aa), 0), mask=live)
        tl.store(to + B * jump, tl.sum(f * bb, 0), mask=live)
        if WITH_QE:
            qq = tl.load(cell + A_REF * field, mask=seen, other=0.0) + sr * moved
            tl.store(to + A_REF * jump, tl.sum(times(g, qq), 0), mask=live)


@triton.jit
def mixture_logs(d, beta):
    """log(p/M) and log(q/M) of M = (1-β)p + βq from d = log p - log q."""
    a = expm1(-tl.abs(d))
    lower = log1p((1.0 - beta) * a)
    log_p = tl.where(d >= 0, -log1p(beta * a), tl.minimum(d, 0.0) - lower)
    return log_p, tl.where(d >= 0, log_p - tl.maximum(d, 0.0), -lower)


@triton.jit
def look_again(
    raw, ref_raw, raw_stride, ref_stride, out, labels, totals, n, width, start, beta,
    LABEL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a slice's shares of jsd and of KL(p‖M) to `out`, (2, n); the slice holds final logits."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < n
    jsd = load_rows(out, 0, n, rows, live)
    first = load_rows(out, 1, n, rows, live)
    label = tl.full((ROWS,), -1, tl.int64)
    if LABEL:
        label = tl.load(labels + rows, mask=live, other=-1)
    for column in range(0, width, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        seen = live[:, None] & (columns < width)[None, :]
        x = tl.load(raw + rows[:, None] * raw_stride + columns[None, :], mask=seen, other=MASK)
        y = tl.load(ref_raw + rows[:, None] * ref_stride + columns[None, :], mask=seen, other=MASK)
        seen = seen & ((start + columns)[None, :] != label[:, None])
        x = tl.where(seen, x, MASK)
        y = tl.where(seen, y, MASK)
        p = tl.exp((x - load_rows(totals, 0, n, rows, live)[:, None]) - load_rows(totals, 1, n, rows, live)[:, None])
        q = tl.exp((y - load_rows(totals, 4, n, rows, live)[:, None]) - load_rows(totals, 5, n, rows, live)[:, None])
        gap = minus_e(x, y, load_rows(totals, 2, n, rows, live), seen)
        log_p, log_q = mixture_logs(load_rows(totals, 3, n, rows, live)[:, None] - gap, beta)
        share = tl.where(p > 0, p * log_p, 0.0)
        first += tl.sum(share, 1)
        jsd += tl.sum((1.0 - beta) * share + tl.where(q > 0, beta * q * log_q, 0.0), 1)
    tl.store(out + rows, jsd, mask=live)
    tl.store(out + n + rows, first, mask=live)


@triton.jit
def unfold_slice(
    raw, ref_raw, raw_stride, ref_stride, out, out_stride, totals, slopes, labels, heat, ref_heat, bias, ref_bias,
    n, width, start, beta,
    RAW: tl.constexpr, LABEL: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, REF: tl.constexpr,
    REF_BIAS: tl.constexpr, REF_CAP: tl.constexpr, PLOGP: tl.constexpr, PD: tl.constexpr, PM: tl.constexpr,
    P2: tl.constexpr, Q: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/d(products) of a slice, 0 at the label but for δ, over the products themselves where `out` is narrower.

    A narrower gradient's column c lies where column c/2 was: blocks go from left to right, each read before it is
    written, so a row belongs to one program.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < n
    label = tl.full((ROWS,), -1, tl.int64)
    if LABEL:
        label = tl.load(labels + rows, mask=live, other=-1)
    m = load_rows(totals, 0, n, rows, live)
    log_s = load_rows(totals, 1, n, rows, live)
    base = load_rows(slopes, 0, n, rows, live)
    for column in range(0, width, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        ids = start + columns
        inside = columns < width
        seen = live[:, None] & inside[None, :]
        x = tl.load(raw + rows[:, None] * raw_stride + columns[None, :], mask=seen, other=0.0)
        x = tl.maximum(logits(x, heat, bias, n, rows, live, ids, inside, BIAS, CAP, RAW), MASK)
        counted = seen & (ids[None, :] != label[:, None])
        log_p = (tl.where(counted, x, MASK) - m[:, None]) - log_s[:, None]
        p = tl.exp(log_p)
        total = tl.zeros((ROWS, BLOCK), raw.dtype.element_ty) + base[:, None]
        z_ref = x
        if REF:
            z_ref = tl.load(ref_raw + rows[:, None] * ref_stride + columns[None, :], mask=seen, other=0.0)
            z_ref = logits(z_ref, ref_heat, ref_bias, n, rows, live, ids, inside, REF_BIAS, REF_CAP, RAW)
            z_ref = tl.maximum(z_ref, MASK)
        if PD or PM:
            gap = minus_e(x, z_ref, load_rows(totals, 2, n, rows, live), counted)
            d = load_rows(totals, 3, n, rows, live)[:, None] - gap
            if PD:
                total += load_rows(slopes, 2, n, rows, live)[:, None] * d
            if PM:
                log_share, _ = mixture_logs(d, beta)
                total += load_rows(slopes, 3, n, rows, live)[:, None] * log_share
        if PLOGP:
            total += load_rows(slopes, 1, n, rows, live)[:, None] * log_p
        if P2:
            total += load_rows(slopes, 4, n, rows, live)[:, None] * p
        dz = times(p, total)
        if Q:
            m_ref = load_rows(totals, 4, n, rows, live)[:, None]
            q = tl.exp((tl.where(counted, z_ref, MASK) - m_ref) - load_rows(totals, 5, n, rows, live)[:, None])
            dz += q * load_rows(slopes, 5, n, rows, live)[:, None]
        if CAP:
            if ONE:
                dz += load_rows(slopes, 6, n, rows, live)[:, None]
            share = x / load_rows(heat, 2, n, rows, live)[:, None]
            dz = tl.where(counted, dz * (1.0 - share * share), 0.0)
        tl.debug_barrier()
        tl.store(out + rows[:, None] * out_stride + columns[None, :], dz.to(out.dtype.element_ty), mask=seen)


@triton.jit
def rescale(x, plogp, factors, n, width, PLOGP: tl.constexpr, SQUARED: tl.constexpr, BLOCK: tl.constexpr):
    """A token's row of a product, (n, width), times its maximum's growth: most slices have no new maximum.

    factors: (2, n), the growth and its logarithm, by which p·log p gains p first.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row)
    if factor != 1.0:
        if SQUARED:
            factor = factor * factor
        for column in range(0, width, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            inside = columns < width
            p = tl.load(x + row * width + columns, mask=inside, other=0.0)
            tl.store(x + row * width + columns, times(factor, p), mask=inside)
            if PLOGP:
                y = tl.load(plogp + row * width + columns, mask=inside, other=0.0)
                step = tl.load(factors + n + row)
                tl.store(plogp + row * width + columns, times(factor, y + p * step), mask=inside)


@triton.jit
def fold_products(
    tokens, entries, tokens_stride, entries_stride, state, labels, label_logits, heat, bias, n, width, depth, n_parts,
    LABEL: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, WITH_T: tl.constexpr, WITH_R: tl.constexpr,
    RANK: tl.constexpr, WITH_SUM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """Products and fold in one: GROUP blocks of entries for a block of tokens, whose logits never leave the chip.

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
        z = logits(total, heat, bias, n, rows, live, ids, inside, BIAS, CAP, True)
        seen = live[:, None] & inside[None, :]
        if WITH_SUM:
            zsum += tl.sum(tl.where(seen, z, 0.0), 1)
        counted = seen & (ids[None, :] != label[:, None])
        z = tl.where(counted, tl.maximum(z, MASK), MASK)
        _, _, _, _, m, rest, t, r, above = add_block(z, m, rest, t, r, above, label_logit, WITH_T, WITH_R, RANK)
    cell = state + part.to(tl.int64) * n + rows
    field = tl.cast(n_parts, tl.int64) * n
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
def scale(x, factor, count, BLOCK: tl.constexpr):
    """x times a number, in place; nothing is read or written where that is 1."""
    by = tl.load(factor)
    if by != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for begin in range(start, count, step):
            at = begin + tl.arange(0, BLOCK)
            inside = at < count
            y = tl.load(x + at, mask=inside, other=0.0).to(by.dtype) * by  # not by's bf16 rounding: a bias
            tl.store(x + at, y.to(x.dtype.element_ty), mask=inside)
