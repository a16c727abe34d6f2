"""Products with a few rows of a table per token, forward and backward, in N·k·H work and without an (N, k, H) tensor.

`rows_dot` and `rows_sum` are each other's gradients: for the sum S = Σ w_nk·(x_n · table[i_nk]),

    dS/dw = rows_dot(x, table, ids)        dS/dx = rows_sum(w, table, ids)        dS/dtable = scattered w_nk·x_n
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import GradientError
from ..vocab.problem import full_precision

BLOCK = 1 << 19  # elements of gathered rows at a time


def rows_dot(x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """x_n · table[i_nk]: x (N, H) fp32 or fp64, table (V, H) of any floating dtype, ids (N, k) -> (N, k) as x.

    Dense equivalent: `(x @ table.to(x.dtype).T).gather(1, ids)`. Memory: a block of 2 MiB, and dtable as the table.
    """
    return _Product.apply(_dot, x, table, ids)  # pyright: ignore[reportReturnType]


def rows_sum(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Σ_k w_nk·table[i_nk]: weights (N, k) fp32 or fp64, table (V, H), ids (N, k) -> (N, H) as weights.

    Dense equivalent: `zeros(N, V).scatter_add(1, ids, weights) @ table`. Memory: as `rows_dot`.
    """
    return _Product.apply(_sum, weights, table, ids)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    """`_dot` or `_sum` of (x, table, ids); the other one is its gradient with respect to x."""

    @staticmethod
    def forward(ctx: Any, product: Callable[..., Tensor], x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, table, ids)
        return product(x, table, ids)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        first_order()
        x, table, ids = ctx.saved_tensors
        other, (weights, wide) = (_sum, (g, x)) if ctx.product is _dot else (_dot, (x, g))
        dx = other(g, table, ids) if ctx.needs_input_grad[1] else None
        return None, dx, _scatter(weights, wide, table, ids) if ctx.needs_input_grad[2] else None, None


def first_order() -> None:
    """Refuse a double backward, whose gradient would be lost."""
    if torch.is_grad_enabled():
        raise GradientError(
            "logitless.relax: expected a first-order backward, got create_graph=True; second derivatives of soft "
            "tokens are not defined: use SoftTokens.dense() and torch's own products for them"
        )


def _dot(x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    out = x.new_zeros(ids.shape)
    with full_precision(x.device.type):
        for n, k in _blocks(ids, table):
            rows = _rows(table, ids[n, k], x.dtype)
            out[n, k] = torch.bmm(x[n, None], rows.mT)[:, 0]  # on a CPU three times as fast as rows · x
    return out


def _sum(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    if table.dtype == weights.dtype:
        return F.embedding_bag(ids, table.detach(), per_sample_weights=weights, mode="sum")
    out = weights.new_zeros(ids.shape[0], table.shape[1])
    with full_precision(weights.device.type):
        for n, k in _blocks(ids, table):
            out[n] += torch.bmm(weights[n, None, k], _rows(table, ids[n, k], weights.dtype))[:, 0]
    return out


def _scatter(weights: Tensor, x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """The gradient w_nk·x_n added up in row i_nk, in the weights' dtype, then in the table's."""
    out = torch.zeros(table.shape, dtype=weights.dtype, device=table.device)
    for n, k in _blocks(ids, table):
        part = weights[n, k, None] * x[n, None, :]
        out.index_add_(0, ids[n, k].reshape(-1), part.view(-1, x.shape[1]))
    return out.to(table.dtype)


def _rows(table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    return table.detach().index_select(0, ids.reshape(-1)).to(dtype).view(*ids.shape, table.shape[1])


def _blocks(ids: Tensor, table: Tensor) -> Iterator[tuple[slice, slice]]:
    """(tokens, columns) whose rows fill a block at most."""
    n_tokens, k = ids.shape
    width = max(1, table.shape[1])
    columns = max(1, min(k, BLOCK // width))
    tokens = max(1, BLOCK // (columns * width))
    for n in range(0, n_tokens, tokens):
        for c in range(0, k, columns):
            yield slice(n, n + tokens), slice(c, c + columns)
