# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""Products with their sums, and the weights of a gradient that needs p alone, with no slice of logits."""

from __future__ import annotations

import triton
import triton.language as tl

from .accumulate_kernels import PER_TOKEN, REST, M, T
from .maths import EMPTY, MASK, load_rows
from .plain_kernels import LN2, LOG2E, larger


@triton.jit
def weigh_tile(
    tokens,
    entries,
    weights,
    state,
    labels,
    row_scales,
    levels,
    n,
    width,
    depth,
    n_parts,
    part,
    first_row,
    LABEL: tl.constexpr,
    WEIGHS: tl.constexpr,
    WITH_T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """A block's maximum and sums into `state`, without labels; e^(z - level) into `weights` where it WEIGHS."""
    rows, ids = first_row + tl.arange(0, ROWS), part * BLOCK + tl.arange(0, BLOCK)
    z = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in range(0, depth, INNER):
        z = tl.dot(tokens.load([first_row, k]), entries.load([part * BLOCK, k]).T, z, input_precision="ieee")
    live = rows < n
    z *= load_rows(row_scales, 0, n, rows, live)[:, None]
    valid = (ids < width)[None, :]
    if LABEL:
        valid = valid & (ids[None, :] != tl.load(labels + rows, mask=live, other=-1)[:, None])
    z = tl.where(valid, z, MASK)
    m = tl.reduce(z, 1, larger)
    cell = state + part.to(tl.int64) * n + rows
    field = tl.cast(n_parts, tl.int64) * n
    if WEIGHS:
        level = tl.load(levels + rows, mask=live, other=0.0)
        w = tl.exp2((z - level[:, None]) * LOG2E)
        # a block further below the level than e^87 is none of a row's digits
        rest = tl.sum(w, 1) * tl.exp(tl.minimum(level - m, 87.0)) - 1.0
        weights.store([first_row, part * BLOCK], w.to(weights.dtype))
    else:
        d = (z - m[:, None]) * LOG2E
        w = tl.exp2(d)
        # maxima are counted, not added: they would swallow the others' digits
        rest = tl.sum(tl.where(d == 0, 0.0, w), 1) + (tl.sum((d == 0).to(tl.float32), 1) - 1.0)
        if WITH_T:
            tl.store(cell + T * field, tl.where(m <= EMPTY, 0.0, tl.sum(w * d, 1) * LN2), mask=live)
    # a block of a label alone is empty
    tl.store(cell + M * field, tl.where(m <= EMPTY, EMPTY, m), mask=live)
    tl.store(cell + REST * field, tl.where(m <= EMPTY, 0.0, rest), mask=live)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=[*PER_TOKEN, "levels"])
def weigh_products(
    tokens,
    entries,
    weights,
    state,
    labels,
    row_scales,
    levels,
    n,
    width,
    depth,
    n_parts,
    AGAIN: tl.constexpr,
    LABEL: tl.constexpr,
    WEIGHS: tl.constexpr,
    WITH_T: tl.constexpr,
    PERSISTENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """All blocks, those of the same entries one after the other, so that these stay in the L2 cache.

    tokens, entries, weights: descriptors of blocks. A program takes one block after another, reading the next one's
    operands while it writes the last. levels: (2, n), a token's now and in the launch before; AGAIN: a program has
    blocks of the same tokens, and nothing to do where each of these has the same level as before.
    """
    row_blocks = tl.cdiv(n, ROWS)
    if AGAIN:
        rows = (tl.program_id(0) % row_blocks) * ROWS + tl.arange(0, ROWS)
        now = tl.load(levels + rows, mask=rows < n, other=0.0)
        before = tl.load(levels + n + rows, mask=rows < n, other=0.0)
        if tl.max((now != before).to(tl.int32), 0) == 0:
            return
    for tile in tl.range(tl.program_id(0), row_blocks * n_parts, tl.num_programs(0), flatten=PERSISTENT):
        part, first_row = tile // row_blocks, (tile % row_blocks) * ROWS
        weigh_tile(
            tokens,
            entries,
            weights,
            state,
            labels,
            row_scales,
            levels,
            n,
            width,
            depth,
            n_parts,
            part,
            first_row,
            LABEL,
            WEIGHS,
            WITH_T,
            ROWS,
            BLOCK,
            INNER,
        )
