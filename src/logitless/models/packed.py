"""Packed documents: which models keep them apart, and their causal attention in memory linear in the context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

TRIED = 2  # tokens of each of two documents
MASK_BYTES = 128 << 20  # of a block: one bool and one number per query head of a group, query and key


def keeps_apart(model: Any) -> bool:
    """Whether a transformers model computes a document that shares a sequence with others as it does without them.

    Some of its classes make nothing of positions that start anew. Where they are masked, a document's gradient at the
    embeddings of the one before is 0 exactly, in any dtype.
    """
    if model.config._attn_implementation not in ("eager", "sdpa"):  # NSA, which goes by positions itself
        return True
    embeddings = model.get_input_embeddings()
    positions = torch.tensor([[*range(TRIED)] * 2], device=embeddings.weight.device)
    inputs: list[Tensor] = []

    def as_input(module: Any, given: Any, embedded: Tensor) -> Tensor:
        inputs.append(embedded.detach().requires_grad_())
        return inputs[-1].clone()  # which some models scale in place

    hook, was_training = embeddings.register_forward_hook(as_input), model.training
    try:
        with torch.enable_grad():
            logits = model.eval()(input_ids=positions, position_ids=positions, use_cache=False).logits
    finally:
        hook.remove()
        model.train(was_training)
    (gradient,) = torch.autograd.grad(logits[:, TRIED:].float().square().sum(), inputs[0])
    return not gradient[:, :TRIED].nan_to_num().any()  # NaN is of weights, which a loss will say


def packed_attention(
    query: Tensor,  # (B, heads, T, D)
    key: Tensor,  # (B, kv_heads, S, D)
    value: Tensor,  # (B, kv_heads, S, D)
    positions: Tensor,  # (B or 1, T): of each query in its document
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:  # (B, heads, T, D)
    """Attention of a sequence's last T tokens to the keys of their own documents, differentiable in q, k and v.

    Dense equivalent, key and value repeated for the heads of a group:

        last = torch.arange(S - T, S)
        first = (last - positions).clamp(min=0)
        sees = (torch.arange(S) >= first[..., None]) & (torch.arange(S) <= last[:, None])
        scaled_dot_product_attention(query, key, value, attn_mask=sees[:, None], scale=scaling)

    window: sees that many keys at most, itself the last. Masks are those of a block of queries and the keys from its
    first document on, about 128 MiB; backward makes them again, and sums in fp32 (fp64 for fp64).
    """
    last = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
    first = (last - positions).clamp(min=0).expand(query.shape[0], -1)
    if window is not None:
        first = first.maximum(last - window + 1)
    return _Streamed.apply(query, key, value, first, scaling)  # pyright: ignore[reportReturnType]


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, first, scaling):
        result = torch.empty_like(query)
        for block in _blocks(query, key, first):
            result[:, :, block.queries] = block.attend(*block.operands(query, key, value), scaling)
        ctx.save_for_backward(query, key, value, first)
        ctx.scaling = scaling
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        *tensors, first = ctx.saved_tensors
        wide = torch.promote_types(upstream.dtype, torch.float32)
        gradients = [torch.zeros(t.shape, dtype=wide, device=t.device) for t in tensors]
        for block in _blocks(tensors[0], tensors[1], first):
            operands = [t.detach().requires_grad_() for t in block.operands(*tensors)]
            with torch.enable_grad():
                result = block.attend(*operands, scaling=ctx.scaling)
            found = torch.autograd.grad(result, operands, upstream[:, :, block.queries])
            for into, gradient in zip(block.operands(*gradients), found, strict=True):
                into += gradient
        return (*(g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True)), None, None)


@dataclass(frozen=True)
class Block:
    """Some queries, the keys that any of them sees, and from which to which each does."""

    queries: slice
    keys: slice
    first: Tensor  # (B, queries)
    last: Tensor  # (queries,)

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query[:, :, self.queries], key[:, :, self.keys], value[:, :, self.keys]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """(B, heads, queries, D); heads of a group meet their keys as so many more queries, so that none is copied."""
        grouped = query.unflatten(1, (key.shape[1], -1))
        group, length = grouped.shape[2:4]
        places = torch.arange(self.keys.start, self.keys.stop, device=key.device)
        sees = (places >= self.first[..., None]) & (places <= self.last[:, None])
        sees = sees[:, None, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
        result = scaled_dot_product_attention(grouped.flatten(2, 3), key, value, attn_mask=sees, scale=scaling)
        return result.unflatten(2, (group, length)).flatten(1, 2)


def _blocks(query: Tensor, key: Tensor, first: Tensor) -> Iterator[Block]:
    batch, heads, length, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    size = max(1, MASK_BYTES // (batch * heads // kv_heads * keys * (1 + key.itemsize)))
    starts = torch.stack([part.amin() for part in first.split(size, dim=1)]).tolist()
    last = torch.arange(keys - length, keys, device=query.device)
    for begin, start in zip(range(0, length, size), starts, strict=True):
        end = min(begin + size, length)
        queries = slice(begin, end)
        yield Block(queries, slice(start, keys - length + end), first[:, queries], last[queries])
