# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""Kernels over a few rows of a table per token: their products with tokens, and the gradients of these."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(x, x_stride, table, table_stride, ids, of, out, k, width, OF: tl.constexpr, BLOCK: tl.constexpr):
    """x_n · table[i_nk], summed in the result's dtype; with OF the row of x is that of `of`."""
    at = tl.program_id(0).to(tl.int64)
    row = at // k
    if OF:
        row = tl.load(of + row)
    own = x + row * x_stride
    theirs = table + tl.load(ids + at) * table_stride
    dtype = out.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype)
    for column in range(0, width, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        inside = columns < width
        a = tl.load(own + columns, mask=inside, other=0.0).to(dtype)
        total += a * tl.load(theirs + columns, mask=inside, other=0.0).to(dtype)
    tl.store(out + at, tl.sum(total, 0))


@triton.jit
def add_weighted(into, into_stride, weights, table, table_stride, ids, k, width, BLOCK: tl.constexpr):
    """into_n += Σ_k w_nk·table[i_nk]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.load(into + row * into_stride + columns, mask=inside, other=0.0)
    for j in range(k):
        weight = tl.load(weights + row * k + j)
        theirs = table + tl.load(ids + row * k + j) * table_stride
        total += weight * tl.load(theirs + columns, mask=inside, other=0.0).to(total.dtype)
    tl.store(into + row * into_stride + columns, total, mask=inside)


@triton.jit(do_not_specialize=["count"])
def scatter(
    into, into_stride, weights, x, x_stride, ids, order, of, k, count, width,
    OF: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """into[i] += Σ w·x over the places whose id is i: sorted ids, and from which place each came; OF as in `dot`.

    The first place of an id adds up all of them, PLACES at a time in the order in which they stand; the others end at
    once.
    """
    at = tl.program_id(0).to(tl.int64)
    mine = tl.load(ids + at)
    before = tl.load(ids + at - 1, mask=at > 0, other=-1)
    if before != mine:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        total = tl.load(into + mine * into_stride + columns, mask=inside, other=0.0).to(weights.dtype.element_ty)
        more = 1
        while more > 0:
            run = at + tl.arange(0, PLACES)
            same = tl.load(ids + run, mask=run < count, other=-1) == mine
            place = tl.load(order + run, mask=same, other=0)
            weight = tl.load(weights + place, mask=same, other=0.0)
            row = place // k
            if OF:
                row = tl.load(of + row, mask=same, other=0)
            at_rows = x + (row * x_stride)[:, None] + columns[None, :]
            rows = tl.load(at_rows, mask=same[:, None] & inside[None, :], other=0.0)
            total += tl.sum(weight[:, None] * rows.to(total.dtype), 0)
            at += PLACES
            more = tl.min(same.to(tl.int32), 0)
        tl.store(into + mine * into_stride + columns, total, mask=inside)
