"""Attention of each query to the blocks it selected, block by block: no query gathers keys of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...vocab.face import current_sizing, full_precision

ROWS = 4096  # queries times heads of a group that meet a block at once


def selected_attention(
    query: Tensor,  # (heads, T, D)
    key: Tensor,  # (kv_heads, S, D)
    value: Tensor,  # (kv_heads, S, D)
    blocks: Tensor,  # (kv_heads, T, n) integers, each at most once for a query; those after its own block are left out
    size: int,
    scaling: float,
) -> Tensor:  # (heads, T, D)
    """Causal attention of the last T queries of a sequence to the tokens of their blocks of `size`.

    Dense: softmax of query · keyᵀ · scaling over the tokens whose block is in `blocks`, up to the query's own.

    A block's keys meet all queries that chose it in one product, and the partial softmaxes merge (Dao et al., arXiv
    2205.14135): what is read per query and block is one row, not `size` keys. Memory: O(T · (n + D)). Sums in fp32
    (fp64 for fp64), in the order of the blocks.
    """
    with full_precision(query.device.type):  # autocast would round the scores, which backward computes again
        return _Selected.apply(query, key, value, blocks, size, scaling)  # pyright: ignore[reportReturnType]


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, blocks, size, scaling):
        wide = torch.promote_types(query.dtype, torch.float32)
        grouped = query.unflatten(0, (key.shape[0], -1)).transpose(1, 2)  # (kv_heads, T, group, D)
        result = torch.zeros(grouped.shape, dtype=wide, device=query.device)
        total = torch.zeros(grouped.shape[:-1], dtype=wide, device=query.device)
        top = torch.full_like(total, -torch.inf)
        for head, rows, at, unseen in _meetings(blocks, key.shape[1], size, grouped.shape[2]):
            scores = _scores(grouped[head, rows], key[head, at], unseen, scaling)
            before, most = top[head, rows], scores.amax(-1)
            most = torch.maximum(before, most)
            weights, shrink = (scores - most[..., None]).exp_(), (before - most).exp_()
            top[head, rows] = most
            total[head, rows] = total[head, rows] * shrink + weights.sum(-1)
            result[head, rows] = result[head, rows] * shrink[..., None] + weights @ value[head, at].to(wide)
            del rows, unseen, scores, before, most, weights, shrink  # before the next meeting's are made
        result /= total[..., None]
        ctx.save_for_backward(query, key, value, blocks, result, top + total.log())
        ctx.size, ctx.scaling = size, scaling
        return result.transpose(1, 2).flatten(0, 1).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        query, key, value, blocks, result, logsumexp = ctx.saved_tensors
        wide = result.dtype
        grouped = query.unflatten(0, (key.shape[0], -1)).transpose(1, 2)
        upstream = upstream.to(wide).unflatten(0, (key.shape[0], -1)).transpose(1, 2)
        shift = (upstream * result).sum(-1, keepdim=True)
        d_query = torch.zeros(grouped.shape, dtype=wide, device=query.device)
        d_key, d_value = (torch.zeros(key.shape, dtype=wide, device=key.device) for _ in range(2))
        for head, rows, at, unseen in _meetings(blocks, key.shape[1], ctx.size, grouped.shape[2]):
            asked, near, given = grouped[head, rows], key[head, at].to(wide), upstream[head, rows]
            weights = (_scores(asked, near, unseen, ctx.scaling) - logsumexp[head, rows][..., None]).exp_()
            d_scores = weights * (given @ value[head, at].to(wide).mT - shift[head, rows]) * ctx.scaling
            d_query[head, rows] += d_scores @ near
            d_key[head, at] += d_scores.flatten(0, 1).mT @ asked.to(wide).flatten(0, 1)
            d_value[head, at] += weights.flatten(0, 1).mT @ given.flatten(0, 1)
            del rows, unseen, asked, near, given, weights, d_scores
        gradient = d_query.transpose(1, 2).flatten(0, 1).to(query.dtype)
        return gradient, d_key.to(key.dtype), d_value.to(value.dtype), None, None, None


def _scores(query: Tensor, key: Tensor, unseen: Tensor, scaling: float) -> Tensor:
    """(queries, group, size) in fp32, -inf where a token is unseen, (queries, size)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return (query.to(wide) @ key.to(wide).mT * scaling).masked_fill_(unseen[:, None], -torch.inf)


def _meetings(blocks: Tensor, keys: int, size: int, group: int) -> Iterator[tuple[int, Tensor, slice, Tensor]]:
    """(head, queries, tokens, unseen) for each block and the queries that chose it, at most ROWS at a time.

    On tensors without numbers (`vocab.sizing`): the first head's first meeting alone. Every query chooses the first
    block, so no meeting has more rows, and none finds anything that another one left.
    """
    positions = torch.arange(keys - blocks.shape[1], keys, device=blocks.device)
    rows_at_once = max(1, ROWS // group)
    if current_sizing() is not None:
        queries, _ = _by_block(blocks[0], positions, keys, size)
        yield 0, *_meeting(queries[: min(rows_at_once, len(positions))], positions, 0, keys, size)
        return
    for head, ids in enumerate(blocks):
        queries, bounds = _by_block(ids, positions, keys, size)
        for block, (begin, end) in enumerate(pairwise(bounds.tolist())):
            for rows in queries[begin:end].split(rows_at_once) if end > begin else ():
                yield head, *_meeting(rows, positions, block, keys, size)
        del queries, bounds, rows  # before the next head sorts


def _by_block(ids: Tensor, positions: Tensor, keys: int, size: int) -> tuple[Tensor, Tensor]:
    """The queries in the order of the blocks they chose, (T · n), and where each block's begin, (blocks + 1)."""
    inside = ids <= positions[:, None] // size
    chosen, order = torch.where(inside, ids, -1).flatten().sort(stable=True)
    blocks = torch.arange(-(-keys // size) + 1, dtype=chosen.dtype, device=ids.device)
    return order.div_(ids.shape[1], rounding_mode="floor"), torch.searchsorted(chosen, blocks)


def _meeting(rows: Tensor, positions: Tensor, block: int, keys: int, size: int) -> tuple[Tensor, slice, Tensor]:
    at = slice(block * size, min((block + 1) * size, keys))
    tokens = torch.arange(at.start, at.stop, device=rows.device)
    return rows, at, tokens > positions[rows, None]
