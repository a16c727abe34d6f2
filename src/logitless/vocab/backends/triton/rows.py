"""`backends.rows` as kernels: products with a few rows of a table per token, one launch each."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import triton
from torch import Tensor

from ...head.quantised import Weight
from .. import rows as plain
from . import rows_kernels
from .device import on

kernels: Any = rows_kernels
BLOCK = {"cpu": 1 << 14, "cuda": 1024}  # numbers of a row at a time
PLACES = 8  # rows at a time that go to one entry: labels repeat, and a row after another is a wait each


def _fits(table: Weight, cast: torch.dtype | None, *others: Tensor) -> TypeGuard[Tensor]:
    """Whether the kernels read these as they are: rows of consecutive numbers, not rounded on the way."""
    return (
        isinstance(table, Tensor)
        and cast in (None, table.dtype)
        and all(x.stride(-1) == 1 for x in (table, *others) if x.shape[-1] > 1)
    )


def dot(
    x: Tensor,
    table: Weight,
    ids: Tensor,
    cast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    of: Tensor | None = None,
) -> Tensor:
    """`rows.dot`: a program for each of ids, (N, k)."""
    if not _fits(table, cast, x) or ids.numel() == 0:
        return plain.dot(x, table, ids, cast, dtype, of)
    out = torch.empty(ids.shape, dtype=dtype or x.dtype, device=x.device)
    with on(x.device):
        kernels.dot[(ids.numel(),)](
            x,
            x.stride(0),
            table.detach(),
            table.stride(0),
            ids.contiguous(),
            ids if of is None else of.contiguous(),
            out,
            ids.shape[1],
            x.shape[1],
            OF=of is not None,
            BLOCK=_block(x),
        )
    return out


def add_weighted(
    into: Tensor,
    weights: Tensor,
    table: Weight,
    ids: Tensor,
    cast: torch.dtype | None = None,
    of: Tensor | None = None,
) -> None:
    """`rows.add_weighted`: a program for each block of a token's row."""
    if not _fits(table, cast, into) or ids.numel() == 0 or (of is not None and ids.shape[1] > 1):
        plain.add_weighted(into, weights, table, ids, cast, of)
        return
    if of is not None:  # the same as a scatter with the table's rows in the tokens' place
        scatter(weights, table, of[:, None], into, ids[:, 0])
        return
    width, block = into.shape[1], _block(into)
    with on(into.device):
        kernels.add_weighted[(ids.shape[0], triton.cdiv(width, block))](
            into,
            into.stride(0),
            weights.contiguous(),
            table.detach(),
            table.stride(0),
            ids.contiguous(),
            ids.shape[1],
            width,
            BLOCK=block,
        )


def scatter(weights: Tensor, x: Tensor, ids: Tensor, into: Tensor, of: Tensor | None = None) -> None:
    """`rows.scatter`: ids are sorted, so that one program adds up what goes to a row, in the order of tokens.

    `into` may be narrower than the weights: a row is rounded once.
    """
    if into.device.type == "cpu" and into.dtype != weights.dtype:  # the interpreter cuts digits off, a GPU rounds
        wide = into.to(weights.dtype)
        scatter(weights, x, ids, wide, of)
        into.copy_(wide)
        return
    if not _fits(into, None, x) or ids.numel() == 0:
        plain.scatter(weights, x, ids, into, of)
        return
    found = ids.flatten().sort(stable=True)
    width, block = into.shape[1], _block(into)
    with on(into.device):
        kernels.scatter[(ids.numel(), triton.cdiv(width, block))](
            into,
            into.stride(0),
            weights.contiguous(),
            x,
            x.stride(0),
            found.values,
            found.indices,
            ids if of is None else of.contiguous(),
            ids.shape[1],
            ids.numel(),
            width,
            OF=of is not None,
            PLACES=PLACES,
            BLOCK=block,
        )


def _block(x: Tensor) -> int:
    return min(BLOCK[x.device.type], triton.next_power_of_2(max(1, x.shape[1])))
