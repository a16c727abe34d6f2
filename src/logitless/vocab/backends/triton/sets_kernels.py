# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""Kernels over ragged sets of entries, a program for each token: what they hold, their online softmax, its gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from .accumulate_kernels import add_block, add_reference, nearest, store_reference, store_sums
from .logits_grad_kernels import logits_grad
from .maths import EMPTY, MASK, finite, load_rows, minus_e


@triton.jit(do_not_specialize=["rows", "ignored"], do_not_specialize_on_alignment=["ids", "labels"])
def look_at_sets(
    ids,
    offsets,
    labels,
    tokens,
    labels_at,
    doubts,
    rows,
    ignored,
    LABEL: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each entry's token and each label's place among the entries, and whether something may be wrong with the set.

    It is empty, has an id twice or one that is none of `rows` entries, or not its label, or a label that is `ignored`;
    or more than MOST entries, which are not compared with one another.
    """
    token = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + token)
    stop = tl.load(offsets + token + 1)
    doubt = ((stop <= begin) | (stop - begin > MOST)).to(tl.int32)
    label = tl.full((), -1, tl.int64)
    if LABEL:
        label = tl.load(labels + token)
    place = tl.full((), -1, tl.int64)
    equal = 0
    for first in range(begin, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < stop
        mine = tl.load(ids + at, mask=inside, other=0)
        tl.store(tokens + at, token, mask=inside)
        doubt |= tl.max(((mine < 0) | (mine >= rows)).to(tl.int32), 0)
        if LABEL:
            place = tl.maximum(place, tl.max(tl.where(inside & (mine == label), at, -1), 0))
        if stop - begin <= MOST:
            own = tl.where(inside, mine, -1).to(tl.int32)  # whatever does not fit is none of `rows` entries
            for other in range(begin, stop, BLOCK):
                there = other + tl.arange(0, BLOCK)
                theirs = tl.load(ids + there, mask=there < stop, other=-2).to(tl.int32)
                equal += tl.sum(tl.sum((own[:, None] == theirs[None, :]).to(tl.int32), 1), 0)
    doubt |= (equal != stop - begin).to(tl.int32)  # each with itself alone
    if LABEL:
        doubt |= ((place < 0) | (label == ignored)).to(tl.int32)
        tl.store(labels_at + token, place)
    tl.store(doubts + token, doubt)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["z", "z_ref", "labels_at", "label_logits"])
def accumulate_sets(
    z,
    z_ref,
    offsets,
    labels_at,
    label_logits,
    state,
    n,
    LABEL: tl.constexpr,
    REF: tl.constexpr,
    WITH_T: tl.constexpr,
    WITH_R: tl.constexpr,
    RANK: tl.constexpr,
    WITH_SUM: tl.constexpr,
    WITH_QE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The accumulation of each token's entries but its label, (FIELDS, n), from their logits, (M,)."""
    token = tl.program_id(0).to(tl.int64)
    zero = tl.zeros((1,), z.dtype.element_ty)
    cell = state + token + tl.zeros((1,), tl.int64)
    field = tl.cast(n, tl.int64)
    live = zero == 0
    m, rest, t, r, above, zsum = zero + EMPTY, zero, zero, zero, zero, zero
    m_ref, s_ref, near, shift, a, b, a_ref = zero + EMPTY, zero, zero + EMPTY, zero, zero, zero, zero
    place = tl.full((), -1, tl.int64)
    label_logit = zero
    if LABEL:
        place = tl.load(labels_at + token)
        label_logit = tl.maximum(tl.load(label_logits + token) + zero, MASK)
    begin = tl.load(offsets + token)
    stop = tl.load(offsets + token + 1)
    for first in range(begin, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < stop
        valid = (inside & (at != place))[None, :]
        x = tl.load(z + at, mask=inside, other=0.0)[None, :]
        if WITH_SUM:
            zsum += tl.sum(x, 1)
        gap = x
        y = x
        moved = zero
        if REF:
            y = tl.load(z_ref + at, mask=inside, other=0.0)[None, :]
            before = shift
            near, shift = nearest(finite(x), finite(y), valid, near, shift)
            moved = before - shift
            gap = minus_e(x, y, shift, valid)
        x = tl.where(valid, finite(x), MASK)
        s = 1.0 + rest
        w, grow, step, m, rest, t, r, above = add_block(x, m, rest, t, r, above, label_logit, WITH_T, WITH_R, RANK)
        if REF:
            y = tl.where(valid, finite(y), MASK)
            m_ref, s_ref, a, b, a_ref = add_reference(
                gap, y, w, s, grow, step, moved, m, shift, m_ref, s_ref, a, b, a_ref, True, WITH_QE
            )
    store_sums(cell, field, live, m, rest, t, r, above, zsum, WITH_T, WITH_R, RANK, WITH_SUM)
    if REF:
        store_reference(cell, field, live, m_ref, s_ref, near, shift, a, b, a_ref, WITH_QE)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["z", "z_ref", "labels_at", "at_label"])
def logits_grad_sets(
    z,
    z_ref,
    offsets,
    labels_at,
    at_label,
    row_scales,
    out,
    n,
    totals,
    coefficients,
    PLOGP: tl.constexpr,
    PD: tl.constexpr,
    PM: tl.constexpr,
    P2: tl.constexpr,
    Q: tl.constexpr,
    ONE: tl.constexpr,
    AHEAD: tl.constexpr,
    EXCESS: tl.constexpr,
    LABEL: tl.constexpr,
    REF: tl.constexpr,
    CAP: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dL/d(hW) of each token's entries, (M,): the formula, and at the label its own number."""
    token = tl.program_id(0).to(tl.int64)
    rows = token + tl.zeros((1,), tl.int64)
    live = rows == token
    m = load_rows(totals, 0, n, rows, live)
    log_s = load_rows(totals, 1, n, rows, live)
    base = load_rows(coefficients, 0, n, rows, live)
    one = tl.zeros((1,), base.dtype)
    if ONE and not CAP:
        one = load_rows(coefficients, 6, n, rows, live)
    place = tl.full((), -1, tl.int64)
    own = base
    if LABEL:
        place = tl.load(labels_at + token)
        own = load_rows(at_label, 0, n, rows, live)
    begin = tl.load(offsets + token)
    stop = tl.load(offsets + token + 1)
    for first in range(begin, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < stop
        valid = (inside & (at != place))[None, :]
        x = tl.where(valid, finite(tl.load(z + at, mask=inside, other=0.0)[None, :]), MASK)
        y = x
        if REF:
            y = finite(tl.load(z_ref + at, mask=inside, other=0.0)[None, :])
        dz = logits_grad(
            x, y, valid, m, log_s, base, totals, coefficients, row_scales, n, rows, live,
            BETA, CAP, PLOGP, PD, PM, AHEAD, P2, Q, ONE, EXCESS,
        )  # fmt: skip
        if LABEL:
            dz = tl.where(valid, dz, own[:, None])
        dz = tl.ravel(dz + one[:, None])
        tl.store(out + at, dz, mask=inside)
