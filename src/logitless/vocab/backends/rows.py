"""Products with a few rows of a table per token, in N·k·H work, a block of gathered rows at a time.

`dot` and `weighted` are each other's gradients: for the sum S = Σ w_nk·(x_n · table[i_nk]),

    dS/dw = dot(x, table, ids)        dS/dx = weighted(w, table, ids)        dS/dtable = scatter of w_nk·x_n
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ..head.quantised import Weight

BLOCK = 1 << 19  # elements of gathered rows at a time, on a CPU
GPU_BLOCK = 1 << 22


def dot(
    x: Tensor,
    table: Weight,
    ids: Tensor,
    cast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    of: Tensor | None = None,
) -> Tensor:
    """x_n · table[i_nk]: x (N, H), table (V, H) of any dtype, rounded to `cast` first, ids (N, k) -> (N, k).

    dtype: of the products and the result, x's unless given. of: (N,), the row of x that each row of ids is for, where
    it is not its own; in the other functions the row of their tokens.
    """
    x = x.to(dtype or x.dtype)
    out = x.new_zeros(ids.shape)
    for n, k in _blocks(ids, table):
        rows, own = _rows(table, ids[n, k], x.dtype, cast), x[n] if of is None else x[of[n]]
        out[n, k] = torch.bmm(own[:, None], rows.mT)[:, 0]  # on a CPU three times as fast as rows · x
    return out


def weighted(weights: Tensor, table: Weight, ids: Tensor, cast: torch.dtype | None = None) -> Tensor:
    """Σ_k w_nk·table[i_nk]: weights (N, k), table (V, H), ids (N, k) -> (N, H) as weights."""
    alike = table.dtype == weights.dtype and cast in (None, table.dtype)
    if ids.shape[1] and alike and isinstance(table, Tensor):
        return F.embedding_bag(ids, table.detach(), per_sample_weights=weights, mode="sum")
    out = weights.new_zeros(ids.shape[0], table.shape[1])
    for n, k in _blocks(ids, table):
        out[n] += torch.bmm(weights[n, None, k], _rows(table, ids[n, k], weights.dtype, cast))[:, 0]
    return out


def add_weighted(
    into: Tensor,
    weights: Tensor,
    table: Weight,
    ids: Tensor,
    cast: torch.dtype | None = None,
    of: Tensor | None = None,
) -> None:
    """into += `weighted`."""
    if of is None:
        into += weighted(weights, table, ids, cast)
        return
    for n, k in _blocks(ids, table):
        part = torch.bmm(weights[n, None, k], _rows(table, ids[n, k], weights.dtype, cast))
        add_at(into, of[n], part[:, 0])


def scatter(weights: Tensor, x: Tensor, ids: Tensor, into: Tensor, of: Tensor | None = None) -> None:
    """Adds w_nk·x_n to row i_nk of `into` (V, H): weights (N, k) of its dtype, x (N, H)."""
    x = x.to(weights.dtype)
    for n, k in _blocks(ids, into):
        own = x[n] if of is None else x[of[n]]
        part = weights[n, k, None] * own[:, None, :]
        add_at(into, ids[n, k].reshape(-1), part.view(-1, x.shape[1]))


def add_at(into: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """into[ids] += rows, ids (n,) with repeats, in an order that is always the same: on a GPU not index_add's."""
    if into.device.type == "cuda":
        return into.index_put_((ids,), rows, accumulate=True)
    return into.index_add_(0, ids, rows)


def _rows(table: Weight, ids: Tensor, dtype: torch.dtype, cast: torch.dtype | None) -> Tensor:
    flat = ids.reshape(-1)
    rows = table.detach().index_select(0, flat) if isinstance(table, Tensor) else table.rows_at(flat)
    return rows.to(cast or rows.dtype).to(dtype).view(*ids.shape, table.shape[1])


def _blocks(ids: Tensor, table: Weight) -> Iterator[tuple[slice, slice]]:
    """(tokens, columns) whose rows fill a block at most."""
    n_tokens, k = ids.shape
    width = max(1, table.shape[1])
    block = GPU_BLOCK if table.device.type == "cuda" else BLOCK
    columns = max(1, min(k, block // width))
    tokens = max(1, block // (columns * width))
    for n in range(0, n_tokens, tokens):
        for c in range(0, k, columns):
            yield slice(n, n + tokens), slice(c, c + columns)
