# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""The kernels of the gradient: of a slice of logits, a second look at it, scaling by a number.

As in `accumulate_kernels`, a program owns the rows that it writes. What they compute is the algebra of
`algebra/stats.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import (
    IMPOSSIBLE,
    MASK,
    excess,
    expm1,
    finite,
    load_rows,
    logits,
    minus_e,
    mixture_logs,
    sides,
    signed,
    times,
    without_label,
)

# The rows of a kernel's totals and of its coefficients.
TOTALS = ("m", "log_s", "shift", "log_ratio", "m_ref", "log_s_ref")
COEFFICIENTS = ("p", "plogp", "pD", "pM", "p2", "q", "one", "ahead", "behind", "excess")


@triton.jit
def add_to_row(out, row: tl.constexpr, n, rows, live, x):
    """out[row] += x, a number per token."""
    at = out + row * n + rows
    tl.store(at, tl.load(at, mask=live, other=0.0) + x, mask=live)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["labels"])
def look_again(
    raw,
    ref_raw,
    raw_stride,
    ref_stride,
    out,
    labels,
    row_scales,
    ref_row_scales,
    bias,
    ref_bias,
    totals,
    n,
    width,
    padded,
    start,
    RAGGED: tl.constexpr,
    BETA: tl.constexpr,
    RAW: tl.constexpr,
    LABEL: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    REF_BIAS: tl.constexpr,
    REF_CAP: tl.constexpr,
    JSD: tl.constexpr,
    KL_MIXTURE: tl.constexpr,
    REVERSE_KL_MIXTURE: tl.constexpr,
    EXCESS: tl.constexpr,
    ACCEPTANCE: tl.constexpr,
    TOTAL_VARIATION: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a slice's shares of what needs both log-sum-exps first to the rows of `out`, as SECOND_LOOK names them."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < n
    of_p = tl.zeros((ROWS,), out.dtype.element_ty)
    of_q = tl.zeros((ROWS,), out.dtype.element_ty)
    more = tl.zeros((ROWS,), out.dtype.element_ty)
    surplus = tl.zeros((ROWS,), out.dtype.element_ty)
    overlap = tl.zeros((ROWS,), out.dtype.element_ty)
    distance = tl.zeros((ROWS,), out.dtype.element_ty)
    above = tl.zeros((ROWS,), out.dtype.element_ty)
    below = tl.zeros((ROWS,), out.dtype.element_ty)
    label = tl.full((ROWS,), -1, tl.int64)
    if LABEL:
        label = tl.load(labels + rows, mask=live, other=-1)
    for column in range(0, width, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        room = live[:, None] & (columns < padded)[None, :]
        x = tl.load(raw + rows[:, None] * raw_stride + columns[None, :], mask=room, other=MASK)
        y = tl.load(ref_raw + rows[:, None] * ref_stride + columns[None, :], mask=room, other=MASK)
        seen = room & ((start + columns)[None, :] != label[:, None])
        if RAGGED:
            seen = seen & (columns < width)[None, :]
        if RAW:
            ids, inside = start + columns, columns < width
            x = finite(logits(x, row_scales, bias, n, rows, live, ids, inside, BIAS, CAP, RAW))
            y = finite(logits(y, ref_row_scales, ref_bias, n, rows, live, ids, inside, REF_BIAS, REF_CAP, RAW))
        x = tl.where(seen, x, MASK)
        y = tl.where(seen, y, MASK)
        p = tl.exp((x - load_rows(totals, 0, n, rows, live)[:, None]) - load_rows(totals, 1, n, rows, live)[:, None])
        q = tl.exp((y - load_rows(totals, 4, n, rows, live)[:, None]) - load_rows(totals, 5, n, rows, live)[:, None])
        gap = minus_e(x, y, load_rows(totals, 2, n, rows, live), seen)
        d = load_rows(totals, 3, n, rows, live)[:, None] - gap
        if KL_MIXTURE or REVERSE_KL_MIXTURE:
            more -= tl.sum(signed(d) * tl.maximum(p, q) * expm1(-tl.abs(d)), 1)  # p - q
        if JSD or KL_MIXTURE or REVERSE_KL_MIXTURE:
            log_p, log_q = mixture_logs(d, BETA)
            of_p += tl.sum(tl.where(p > 0, p * log_p, 0.0), 1)
            of_q += tl.sum(tl.where(q > 0, q * log_q, 0.0), 1)
        if EXCESS:
            surplus += tl.sum(p * excess(d, BETA), 1)
        if ACCEPTANCE:
            overlap += tl.sum(tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL), 1)
        if TOTAL_VARIATION:
            distance += tl.sum(tl.maximum(p, q) * expm1(-tl.abs(d)) * -0.5, 1)
        if AHEAD:
            ahead, behind = sides(d)
            above += tl.sum(p * ahead, 1)
            below += tl.sum(p * behind, 1)
    if JSD:
        add_to_row(out, 0, n, rows, live, (1.0 - BETA) * of_p + BETA * of_q)
    if KL_MIXTURE:
        add_to_row(out, 1, n, rows, live, of_p - BETA * more)
    if REVERSE_KL_MIXTURE:
        add_to_row(out, 2, n, rows, live, of_q + (1.0 - BETA) * more)
    if EXCESS:
        add_to_row(out, 3, n, rows, live, surplus)
    if ACCEPTANCE:
        add_to_row(out, 4, n, rows, live, overlap)
    if TOTAL_VARIATION:
        add_to_row(out, 5, n, rows, live, distance)
    if AHEAD:
        add_to_row(out, 6, n, rows, live, above)
        add_to_row(out, 7, n, rows, live, below)


@triton.jit
def ten_digits(x):
    """fp32 numbers rounded to the digits that a TF32 product reads: it cuts off the others, to smaller numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def logits_grad(
    x, z_ref, valid, m, log_s, base, totals, coefficients, row_scales, n, rows, live,
    BETA: tl.constexpr, CAP: tl.constexpr, PLOGP: tl.constexpr, PD: tl.constexpr,
    PM: tl.constexpr, AHEAD: tl.constexpr, P2: tl.constexpr, Q: tl.constexpr, ONE: tl.constexpr, EXCESS: tl.constexpr,
):  # fmt: skip
    """dL/d(products) of a block of finite logits, 0 where x is MASK; with CAP where it is not `valid`, too.

    m, log_s, base: the rows of totals and coefficients that every block needs.
    """
    log_p = (x - m[:, None]) - log_s[:, None]
    p = tl.exp(log_p)
    total = tl.zeros(x.shape, x.dtype) + base[:, None]
    if PD or PM or AHEAD or EXCESS:
        gap = minus_e(x, z_ref, load_rows(totals, 2, n, rows, live), valid)
        d = load_rows(totals, 3, n, rows, live)[:, None] - gap
        if PD:
            total += load_rows(coefficients, 2, n, rows, live)[:, None] * d
        if PM:
            log_share, _ = mixture_logs(d, BETA)
            total += load_rows(coefficients, 3, n, rows, live)[:, None] * log_share
        if EXCESS:
            total += load_rows(coefficients, 9, n, rows, live)[:, None] * excess(d, BETA)
        if AHEAD:
            ahead, behind = sides(d)
            total += load_rows(coefficients, 7, n, rows, live)[:, None] * ahead
            total += load_rows(coefficients, 8, n, rows, live)[:, None] * behind
    if PLOGP:
        total += load_rows(coefficients, 1, n, rows, live)[:, None] * tl.maximum(log_p, IMPOSSIBLE)
    if P2:
        total += load_rows(coefficients, 4, n, rows, live)[:, None] * p
    dz = p * total
    if PD or PM:  # whose factors of p can be infinite
        dz = times(p, total)
    if Q:
        m_ref = load_rows(totals, 4, n, rows, live)[:, None]
        q = tl.exp((tl.where(valid, z_ref, MASK) - m_ref) - load_rows(totals, 5, n, rows, live)[:, None])
        dz += q * load_rows(coefficients, 5, n, rows, live)[:, None]
    if CAP:
        if ONE:
            dz += load_rows(coefficients, 6, n, rows, live)[:, None]
        share = x / load_rows(row_scales, 2, n, rows, live)[:, None]
        dz = tl.where(valid, dz * (1.0 - share * share), 0.0)
    return dz


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["labels"])
def logits_grad_slice(
    raw,
    ref_raw,
    raw_stride,
    ref_stride,
    out,
    out_stride,
    totals,
    coefficients,
    labels,
    row_scales,
    ref_row_scales,
    bias,
    ref_bias,
    n,
    width,
    padded,
    start,
    BETA: tl.constexpr,
    RAW: tl.constexpr,
    LABEL: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    REF: tl.constexpr,
    REF_BIAS: tl.constexpr,
    REF_CAP: tl.constexpr,
    PLOGP: tl.constexpr,
    PD: tl.constexpr,
    PM: tl.constexpr,
    AHEAD: tl.constexpr,
    P2: tl.constexpr,
    Q: tl.constexpr,
    ONE: tl.constexpr,
    EXCESS: tl.constexpr,
    TEN_DIGITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dL/d(products) of a slice, 0 at the label but for δ, over the products themselves where `out` is narrower.

    A narrower gradient's column c lies where column c/2 was: blocks go from left to right, each read before it is
    written, so a row belongs to one program. Whole vectors, where rows end within one: nobody reads what is past it.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < n
    label = tl.full((ROWS,), -1, tl.int64)
    if LABEL:
        label = tl.load(labels + rows, mask=live, other=-1)
    m = load_rows(totals, 0, n, rows, live)
    log_s = load_rows(totals, 1, n, rows, live)
    base = load_rows(coefficients, 0, n, rows, live)
    for column in range(0, width, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        ids = start + columns
        inside = columns < width
        room = live[:, None] & (columns < padded)[None, :]
        x = tl.load(raw + rows[:, None] * raw_stride + columns[None, :], mask=room, other=0.0)
        x = logits(x, row_scales, bias, n, rows, live, ids, inside, BIAS, CAP, RAW)
        if BIAS:
            x = finite(x)
        if LABEL:
            x = without_label(x, ids, label, start + column, BLOCK)
        z_ref = x
        valid = room
        if LABEL and (REF or CAP):
            valid = room & (ids[None, :] != label[:, None])
        if REF:
            z_ref = tl.load(ref_raw + rows[:, None] * ref_stride + columns[None, :], mask=room, other=0.0)
            z_ref = logits(z_ref, ref_row_scales, ref_bias, n, rows, live, ids, inside, REF_BIAS, REF_CAP, RAW)
            z_ref = finite(z_ref)
        dz = logits_grad(
            x, z_ref, valid, m, log_s, base, totals, coefficients, row_scales, n, rows, live,
            BETA, CAP, PLOGP, PD, PM, AHEAD, P2, Q, ONE, EXCESS,
        )  # fmt: skip
        if TEN_DIGITS:
            dz = ten_digits(dz)
        tl.debug_barrier()
        tl.store(out + rows[:, None] * out_stride + columns[None, :], dz.to(out.dtype.element_ty), mask=room)


@triton.jit
def scaled(x, factor, out, count, CONVERTS: tl.constexpr, BLOCK: tl.constexpr):
    """x times a number into `out`; where that is x itself, nothing is read or written if the number is 1."""
    by = tl.load(factor)
    if CONVERTS or by != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for begin in range(start, count, step):
            at = begin + tl.arange(0, BLOCK)
            inside = at < count
            y = tl.load(x + at, mask=inside, other=0.0).to(by.dtype) * by  # not by's bf16 rounding: a bias
            tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
