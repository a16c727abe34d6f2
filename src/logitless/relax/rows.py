"""Differentiable products with a few rows of a table per token, in N·k·H work and without an (N, k, H) tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..upstream import check_upstream
from ..vocab.face import dot, full_precision, scatter, weighted


def rows_dot(x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """x_n · table[i_nk]: x (N, H) fp32 or fp64, table (V, H) of any floating dtype, ids (N, k) -> (N, k) as x.

    Dense equivalent: `(x @ table.to(x.dtype).T).gather(1, ids)`. Memory: a block of 2 MiB, and dtable as the table.
    """
    return _Product.apply(dot, x, table, ids)  # pyright: ignore[reportReturnType]


def rows_sum(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Σ_k w_nk·table[i_nk]: weights (N, k) fp32 or fp64, table (V, H), ids (N, k) -> (N, H) as weights.

    Dense equivalent: `zeros(N, V).scatter_add(1, ids, weights) @ table`. Memory: as `rows_dot`.
    """
    return _Product.apply(weighted, weights, table, ids)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    """`dot` or `weighted` of (x, table, ids); the other one is its gradient with respect to x."""

    @staticmethod
    def forward(ctx: Any, product: Callable[..., Tensor], x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, table, ids)
        with full_precision(x.device.type):
            return product(x, table, ids)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        first_order(g)
        x, table, ids = ctx.saved_tensors
        other, (weights, wide) = (weighted, (g, x)) if ctx.product is dot else (dot, (x, g))
        dx = dtable = None
        if ctx.needs_input_grad[1]:
            with full_precision(x.device.type):
                dx = other(g, table, ids)
        if ctx.needs_input_grad[2]:
            dtable = torch.zeros(table.shape, dtype=weights.dtype, device=table.device)
            scatter(weights, wide, ids, dtable)
            dtable = dtable.to(table.dtype)
        return None, dx, dtable, None


def first_order(*grads: Tensor | None) -> None:
    """Refuse a double backward, whose gradient would be lost, and a batch of upstream gradients."""
    check_upstream(
        grads,
        "logitless.relax: expected a first-order backward, got create_graph=True; second derivatives of soft "
        "tokens are not defined: use SoftTokens.dense() and torch's own products for them",
    )
