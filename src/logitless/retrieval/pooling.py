"""`max_pool_logits`: for each document and vocabulary entry the maximum over tokens of the head's logit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import overload

import torch
from torch import Tensor

from ..algebra.options import is_number, whole, whole_within
from ..errors import DeviceError, DtypeError, OptionError, ShapeError
from ..vocab.face import Call, Documents, LMHead, agreed, dtype_of, flatten, max_pool, max_pool_kept, on_all, with_lora
from .sparse import SparseRows


@dataclass(frozen=True, eq=False)
class MaxPooled:
    """The maxima over each document's tokens, and where they are.

    values: (B, V), fp32 (fp64 for fp64 inputs), differentiable; -inf for a document without tokens. tokens: (B, V)
    int32, the place in its document of the token that has the maximum, of equal ones the first; -1 where there is none.
    """

    values: Tensor
    tokens: Tensor


@overload
def max_pool_logits(
    hidden: Tensor,
    head: LMHead,
    mask: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    above: None = None,
    top_k: None = None,
    memory_budget: int | None = None,
) -> MaxPooled: ...


@overload
def max_pool_logits(
    hidden: Tensor,
    head: LMHead,
    mask: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    above: float,
    top_k: int | None = None,
    memory_budget: int | None = None,
) -> SparseRows: ...


@overload
def max_pool_logits(
    hidden: Tensor,
    head: LMHead,
    mask: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    above: None = None,
    top_k: int,
    memory_budget: int | None = None,
) -> SparseRows: ...


def max_pool_logits(
    hidden: Tensor,  # (B, L, H), or (N, H) with offsets
    head: LMHead,
    mask: Tensor | None = None,  # (B, L)
    *,
    offsets: Tensor | None = None,  # (B + 1,)
    above: float | None = None,
    top_k: int | None = None,
    memory_budget: int | None = None,
) -> MaxPooled | SparseRows:
    """The maximum over each document's tokens of every vocabulary entry's logit, and which token has it.

    Dense equivalent:

        z = softcap(scale * F.linear(hidden, weight, bias))  # (B, L, V), and the head's adapters
        values, tokens = z.masked_fill(mask[..., None] == 0, -inf).max(1)

    hidden: what the head is called with, after a masked-language model's transform (`logitless.hidden_states` returns
    it). mask: which tokens count, as a tokenizer's attention_mask has it; all without one. offsets: in the mask's place
    where documents stand end to end without padding, where each begins and the last ends (flash attention's
    cu_seq_lens). above, top_k: keep a document's entries above that number, its k best, or the k best of those above,
    of equal ones the lowest ids, NaN before all others; the result then is `SparseRows`, and (B, V) never exists.
    memory_budget: bytes of buffers, 256 MiB unless given, up to 1 GiB on a GPU, but at least a document's own maxima.
    Differentiable in values with respect to hidden, weight, bias and the adapters' factors; a maximum that several
    tokens share has its gradient at the first.
    Price: one product forward, 2·N·H·V flop; backward 2·H for each pair with an upstream gradient and each of hidden
    and weight, a gathered row at a time: pairs that an activation or a loss leaves out cost nothing.
    A head that is split over ranks gives every rank the maxima of all rows, from the same documents on each.
    Raises ShapeError, DtypeError, DeviceError, OptionError, GradientError, RankError.
    Memory: (B, V) values and places, or what is kept of them; slices within the budget, O(N·H); never (N, V).
    Formal et al., "SPLADE v2", arXiv 2109.10086; a fused kernel of the same kind: "Sparton", arXiv 2603.25011.
    """
    return _pooled(hidden, head, mask, offsets, above, top_k, memory_budget)


def splade_activation(x: Tensor, logs: int = 1) -> Tensor:
    """SPLADE's weight of an entry from the maximum of its logits.

    Dense equivalent:

        x.relu().log1p()  # and .log1p() again with logs=2

    x: any shape; -inf, a document without tokens, gives 0. logs: 1, or 2 as in inference-free retrievers.
    Formal et al., arXiv 2107.05720; two logarithms: Geng et al., arXiv 2504.14839. Raises OptionError.
    """
    if logs not in (1, 2):
        raise OptionError(f"logs: expected 1 or 2, got {logs!r}")
    x = x.relu().log1p()
    return x if logs == 1 else x.log1p()


@torch.compiler.disable(reason="logitless: max_pool_logits breaks the graph; leave fullgraph=True out")
def _pooled(
    hidden: Tensor,
    head: LMHead,
    mask: Tensor | None,
    offsets: Tensor | None,
    above: float | None,
    top_k: int | None,
    memory_budget: int | None,
) -> MaxPooled | SparseRows:
    def arguments() -> tuple[Call, Documents]:
        call = flatten(hidden, head, None, want=(), memory_budget=memory_budget, backend="eager")
        _check_kept(above, top_k, head.rows)
        return call, _padded(hidden, mask) if offsets is None else _end_to_end(hidden, mask, offsets)

    call, documents = on_all(head, arguments)
    if head.shard is not None:
        call = agreed(replace(call, alike=f"max_pool_logits {above} {top_k}"), documents.rows, documents.first)
    call = with_lora(call, rows=documents.rows)
    if above is None and top_k is None:
        return MaxPooled(*max_pool(call, documents))
    kept = max_pool_kept(call, documents, above, whole(top_k))
    counts = torch.bincount(kept.documents, minlength=len(documents))
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return SparseRows(ends, kept.ids, kept.values, head.rows, kept.places)


def _check_kept(above: float | None, top_k: int | None, rows: int) -> None:
    if above is not None and (not is_number(above) or math.isnan(above)):
        raise OptionError(f"above: expected a number or None, got {above!r}")
    if top_k is not None:
        whole_within("top_k", top_k, 1, rows)


def _padded(hidden: Tensor, mask: Tensor | None) -> Documents:
    """The documents of (B, L, H)."""
    if hidden.dim() != 3:
        raise ShapeError(
            f"hidden: expected (documents, tokens, {hidden.shape[-1]}), got {tuple(hidden.shape)}; pass offsets for "
            "documents that stand end to end"
        )
    n_documents, length = hidden.shape[:2]
    if mask is None:
        mask = torch.ones(n_documents, length, dtype=torch.bool, device=hidden.device)
    _check_integers("mask", mask, hidden)
    if tuple(mask.shape) != (n_documents, length):
        raise ShapeError(f"mask: expected {(n_documents, length)}, a number for each token, got {tuple(mask.shape)}")
    counts = mask.count_nonzero(1).tolist()
    first = torch.arange(n_documents, device=hidden.device) * length
    return Documents(mask.reshape(-1).nonzero().squeeze(1), counts, first)


def _end_to_end(hidden: Tensor, mask: Tensor | None, offsets: Tensor) -> Documents:
    """The documents of (N, H)."""
    if mask is not None:
        raise OptionError("mask: expected None beside offsets, which say by themselves which tokens are a document's")
    if hidden.dim() != 2:
        raise ShapeError(f"hidden: expected (tokens, {hidden.shape[-1]}) with offsets, got {tuple(hidden.shape)}")
    _check_integers("offsets", offsets, hidden)
    ends = offsets.tolist() if offsets.dim() == 1 else []
    ascending = all(a <= b for a, b in pairwise(ends))
    if not ends or ends[0] != 0 or ends[-1] != hidden.shape[0] or not ascending:
        raise ShapeError(
            f"offsets: expected where each document begins, ascending from 0 to {hidden.shape[0]}, got "
            f"{ends if len(ends) < 9 else tuple(offsets.shape)}"
        )
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return Documents(rows, offsets.diff().tolist(), offsets[:-1].long().clone())  # backward's own


def _check_integers(name: str, x: Tensor, hidden: Tensor) -> None:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
        got = dtype_of(x)
        raise DtypeError(f"{name}: expected integers or booleans in a tensor, got {got}")
    if x.device != hidden.device:
        raise DeviceError(f"{name} is on {x.device}, hidden on {hidden.device}; move one of them")
