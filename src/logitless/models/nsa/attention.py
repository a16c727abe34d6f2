"""Native Sparse Attention over one sequence, in chunks of queries: memory linear in the context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...vocab.face import current_sizing
from .options import NSAOptions
from .selected import selected_attention

CHUNK_BYTES = 64 << 20
NOT_A_BLOCK = torch.iinfo(torch.int32).max


def nsa(
    query: Tensor,  # (heads, T, D)
    key: Tensor,  # (kv_heads, S, D)
    value: Tensor,  # (kv_heads, S, D)
    compressed_key: Tensor,  # (kv_heads, options.compressed(S), D)
    compressed_value: Tensor,  # (kv_heads, options.compressed(S), D)
    gates: Tensor,  # (3, heads, T): of the compressed, the selected and the sliding branch
    scaling: float,
    options: NSAOptions,
) -> Tensor:  # (heads, T, D)
    """Causal sparse attention of one sequence's last T queries, differentiable in every tensor.

    The sum over branches of gate × softmax(query · keysᵀ · scaling) · values, with the keys that `NSAOptions` names.
    The heads of a group (grouped-query attention) select the same blocks, by the sum of their attention to the
    compressed ones; the selection itself has no gradient.

    Memory: the results, their gradients, those of keys and values in fp32, and about 64 MiB for a chunk of queries;
    backward recomputes the chunks.
    Softmax, and sums over chunks, in fp32 (fp64 for fp64). Yuan et al., arXiv 2502.11089.
    """
    tensors = query, key, value, compressed_key, compressed_value, gates
    result, blocks = _Streamed.apply(*tensors, scaling, options)  # pyright: ignore[reportGeneralTypeIssues]
    return result + gates[1, ..., None] * selected_attention(query, key, value, blocks, options.selected_block, scaling)


class _Streamed(torch.autograd.Function):
    """The compressed and the sliding branch, gated, in chunks of queries; and which blocks each query selects."""

    @staticmethod
    def forward(ctx: Any, query, key, value, compressed_key, compressed_value, gates, scaling, options):
        tensors = (query, key, value, compressed_key, compressed_value, gates)
        result, most = torch.empty_like(query), options.blocks_of_a_query(key.shape[1])
        chosen = query.new_full((key.shape[0], query.shape[1], most), NOT_A_BLOCK, dtype=torch.int32)
        for part in _chunks(tensors, scaling, options):
            blocks = part.select(compressed_key)  # of early chunks fewer
            chosen[:, part.queries, : blocks.shape[-1]] = blocks
            result[:, part.queries] = part.attend(part.operands(tensors))
        ctx.save_for_backward(*tensors)
        ctx.scaling, ctx.options = scaling, options
        ctx.mark_non_differentiable(chosen)
        return result, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Any):
        tensors = ctx.saved_tensors
        gradients = _zeros_like(tensors)
        for part in _chunks(tensors, ctx.scaling, ctx.options):
            operands = [t.detach().requires_grad_() for t in part.operands(tensors)]
            with torch.enable_grad():
                result = part.attend(operands)
            found = torch.autograd.grad(result, operands, upstream[:, part.queries])
            for into, gradient in zip(part.operands(gradients), found, strict=True):
                into += gradient
            del operands, result, found, gradient  # before the next chunk's are made
        # each sum is released as it is converted
        return (*(gradients.pop(0).to(t.dtype) for t in tensors), None, None)


def _zeros_like(tensors: Any) -> list[Tensor]:
    """Where gradients add up: of keys and values, to which many chunks add, in fp32 (fp64 for fp64)."""
    query, *keys, gates = tensors
    wide = torch.promote_types(query.dtype, torch.float32)
    dtypes = (query.dtype, *(wide for _ in keys), gates.dtype)
    return [torch.zeros(t.shape, dtype=dtype, device=t.device) for t, dtype in zip(tensors, dtypes, strict=True)]


def _chunks(tensors: Any, scaling: float, options: NSAOptions) -> Any:
    """Every chunk, of which the first may be shorter; the last sees most keys, so that no other allocates more.

    On tensors without numbers (`vocab.sizing`) only that one.
    """
    query, key = tensors[0], tensors[1]
    heads, length, _ = query.shape
    size = options.chunk(heads, key.shape[1], CHUNK_BYTES)
    ends = range(length, 0, -size)
    for end in reversed(ends) if current_sizing() is None else ends[:1]:
        yield Chunk(query, key, max(0, end - size), end, scaling, options)


class Chunk:
    """Queries begin..end of a sequence: which keys they see, and their attention to them."""

    def __init__(self, query: Tensor, key: Tensor, begin: int, end: int, scaling: float, options: NSAOptions) -> None:
        self.options, self.scaling, self.queries = options, scaling, slice(begin, end)
        self.kv_heads, offset = key.shape[0], key.shape[1] - query.shape[1]
        self.positions = torch.arange(offset + begin, offset + end, device=query.device)
        last = offset + end  # keys that the chunk's last query sees
        self.compressed = slice(0, options.compressed(last))
        self.window = slice(max(0, offset + begin - options.window + 1), last)
        self.query = query[:, self.queries]

    def grouped(self, x: Tensor) -> Tensor:
        """(heads, ...) as (kv_heads, group, ...)."""
        return x.unflatten(0, (self.kv_heads, -1))

    def select(self, compressed_key: Tensor) -> Tensor:
        """Ids of the selected blocks, (kv_heads, queries, n) int32; beyond the query's own where it has fewer."""
        options, size = self.options, self.options.selected_block
        blocks = -(-int(self.window.stop) // size)
        weights = self.weights(self.query, compressed_key[:, self.compressed], self.sees_compressed()).sum(1)
        score = per_block(weights, blocks, options)
        own = self.positions // size
        ids = torch.arange(blocks, device=score.device)
        near = (ids == 0) | (ids == own[:, None]) | (ids == own[:, None] - 1)
        score = score.masked_fill(near, torch.inf).masked_fill(ids > own[:, None], -torch.inf)
        return score.topk(options.blocks_of_a_query(int(self.window.stop)), dim=-1).indices.to(torch.int32)

    def operands(self, tensors: Any) -> list[Tensor]:
        """What the chunk reads of query, key, value, compressed and gates: views, through which gradients add up."""
        query, key, value, compressed_key, compressed_value, gates = tensors
        return [
            query[:, self.queries],
            compressed_key[:, self.compressed],
            compressed_value[:, self.compressed],
            key[:, self.window],
            value[:, self.window],
            gates[:, :, self.queries],
        ]

    def attend(self, operands: list[Tensor]) -> Tensor:
        """(heads, queries, D), from what `operands` gives."""
        query, compressed_key, compressed_value, key, value, gates = operands
        compressed = self.branch(query, compressed_key, compressed_value, self.sees_compressed(), gates[0])
        return (compressed + self.branch(query, key, value, self.sees_window(), gates[2])).flatten(0, 1)

    def branch(self, query: Tensor, key: Tensor, value: Tensor, sees: Tensor, gate: Tensor) -> Tensor:
        return self.grouped(gate)[..., None] * (self.weights(query, key, sees).to(value.dtype) @ value[:, None])

    def weights(self, query: Tensor, key: Tensor, sees: Tensor) -> Tensor:
        """softmax over the keys seen, (kv_heads, group, queries, keys); 0 where there are none."""
        scores = self.grouped(query) @ key[:, None].mT
        exact = scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.scaling
        some = sees.any(-1, keepdim=True)  # softmax over nothing would be NaN
        return torch.softmax(exact.masked_fill(~sees & some, -torch.inf), dim=-1) * some

    def sees_compressed(self) -> Tensor:
        options = self.options
        end = torch.arange(self.compressed.stop, device=self.positions.device) * options.stride + options.block
        return end <= self.positions[:, None] + 1

    def sees_window(self) -> Tensor:
        ids = torch.arange(self.window.start, self.window.stop, device=self.positions.device)
        back = self.positions[:, None] - ids
        return (back >= 0) & (back < self.options.window)


def per_block(weights: Tensor, blocks: int, options: NSAOptions) -> Tensor:
    """The attention to compressed blocks as attention to selected ones: each stride's share goes where it lies."""
    spans, ratio = options.block // options.stride, options.selected_block // options.stride
    count = weights.shape[-1]
    strides = weights.new_zeros(*weights.shape[:-1], blocks * ratio + spans)
    for shift in range(spans):
        strides[..., shift : shift + count] += weights
    return strides[..., : blocks * ratio].unflatten(-1, (blocks, ratio)).sum(-1)
