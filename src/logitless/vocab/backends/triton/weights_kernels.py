# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""The kernel of a loss that needs p alone: products, sums, and the weights of the gradient, with no slice of logits."""

from __future__ import annotations

import triton
import triton.language as tl

from .accumulate_kernels import PER_TOKEN, REST, M
from .maths import EMPTY, MASK, load_rows
from .plain_kernels import LOG2E, larger


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """e^(z - level) of a block of entries and tokens into `weights`, 0 at labels; maximum and sum into `state`."""
    rows, ids = first_row + tl.arange(0, ROWS), part * BLOCK + tl.arange(0, BLOCK)
    z = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in range(0, depth, INNER):
        z = tl.dot(tokens.load([first_row, k]), entries.load([part * BLOCK, k]).T, z, input_precision="ieee")
    live = rows < n
    level = tl.load(levels + rows, mask=live, other=0.0)
    label = tl.load(labels + rows, mask=live, other=-1)
    z *= load_rows(row_scales, 0, n, rows, live)[:, None]
    z = tl.where((ids < width)[None, :] & (ids[None, :] != label[:, None]), z, MASK)
    m = tl.reduce(z, 1, larger)
    z = tl.exp2((z - level[:, None]) * LOG2E)
    total = tl.sum(z, 1)
    weights.store([first_row, part * BLOCK], z.to(weights.dtype))
    cell = state + part.to(tl.int64) * n + rows
    field = tl.cast(n_parts, tl.int64) * n
    # a block further below the level than e^87 is none of a row's digits; one of a label alone is empty
    rest = tl.where(m <= EMPTY, 0.0, total * tl.exp(tl.minimum(level - m, 87.0)) - 1.0)
    tl.store(cell + M * field, tl.where(m <= EMPTY, EMPTY, m), mask=live)
    tl.store(cell + REST * field, rest, mask=live)


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
            ROWS,
            BLOCK,
            INNER,
        )
