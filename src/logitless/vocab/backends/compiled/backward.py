"""Backward's products of logits that a chunk has stored, by tiles as those that made them: docs/decisions/0053."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from ....algebra.online_softmax import Totals
from ....algebra.stats import Coefficients
from ...head.quantised import plain
from ..base import Gradients
from ..chunk import Chunk
from ..chunk import Tile as Slice
from ..eager.weights import scale_of, weigh_late
from ..logits import Factor as RowsAndEntries
from .library import Factor, Head, OfEntries, OfTokens, Tile, in_pairs, library, run
from .panels import of_tokens, parts_of, product_bytes, products_of, rounded

ToGradient = Callable[[Chunk, Slice, Totals, Coefficients], Tensor]


def logits_grad(chunk: Chunk, totals: Totals, c: Coefficients, grads: Gradients, dz: ToGradient) -> None:
    """`Backend.logits_grad` of coefficients of hW; `dz` makes a slice's logits to their gradient, in their place."""
    m, scale = chunk.materialised[0].m, None
    if m is None:
        for tile in chunk.materialised:
            if (found := dz(chunk, tile, totals, c)) is not tile.z:
                tile.z.copy_(found)
    else:
        scale = scale_of(c["p"], m, totals)
    _multiply_for_entries(chunk, grads, scale, m)
    for tile in chunk.materialised:
        weigh_late(tile)
        if grads.bias is not None:
            grads.bias[tile.v] += (tile.z if scale is None else tile.z * scale).sum(0)
    if any(x is not None for x, _ in grads.pairs):
        _multiply_for_tokens(chunk, grads, scale)


def bytes_beside(width: int, n_tokens: int, pairs: bool) -> tuple[int, int]:
    """Bytes for all tokens, and for each, of products with `width` numbers of a row; the others as `product_bytes`."""
    found, threads = library(), torch.get_num_threads()
    own, each = product_bytes(width, 1, n_tokens, pairs)
    scaled = 3 * rounded(width, found.lanes())  # hidden states, transposed and packed, too
    return own + 4 * threads * found.entries() * found.lanes(), each + 4 * (scaled + threads * found.entries())


def _multiply_for_entries(chunk: Chunk, grads: Gradients, scale: Tensor | None, m: Tensor | None) -> None:
    """Add the weights' products with hidden states to the gradients by entry; of logits that are late, made here."""
    for factor, (_, entries) in zip(chunk.policy.factors, grads.pairs, strict=False):
        if entries is None:
            continue
        begins = entries is grads.weight and grads.begins()
        late = m if chunk.materialised[0].late else None
        _put_products(chunk, factor, scale, entries, begins, late)
        for tile in chunk.materialised:
            tile.late = False


def _put_products(
    chunk: Chunk, of: RowsAndEntries, scale: Tensor | None, out: Tensor, begins: bool, m: Tensor | None
) -> None:
    """out (V, K) = the chunk's weights, times scale (C, 1), times a factor's tokens (C, K), or added to it."""
    pairs = in_pairs(of.is_bf16)
    tokens = of.tokens if scale is None or pairs else of.tokens * scale
    n, size = tokens.shape
    transposed = tokens.t().contiguous()
    factor = Factor(tokens=transposed.data_ptr(), tokens_stride=n, size=n, pairs=pairs)
    packed = chunk.scratch.take("packed tokens", (factor.length, rounded(size, library().lanes())))
    if m is not None:
        m = torch.nn.functional.pad(m, (0, -n % library().lanes()))
    call = OfEntries(
        tile=_tile(chunk, m),
        tokens=Head(ctypes.pointer(factor), 1, packed=packed.data_ptr()),
        size=size,
        out=out.data_ptr(),
        stride=out.stride(0),
        adds=not begins,
        scale=scale.data_ptr() if scale is not None and pairs else None,
    )
    run(library().multiply_entries, call)


def _multiply_for_tokens(chunk: Chunk, grads: Gradients, scale: Tensor | None) -> None:
    """Add the weights' products with the head's rows to the gradients by token."""
    width = rounded(chunk.n_tokens, library().lanes())
    products, streamed = products_of(chunk, ("p",), width)
    head = Head(_entries(chunk.policy.factors), len(chunk.policy.factors))
    call = OfTokens(tile=_tile(chunk), head=head, products=streamed, parts=parts_of(width))
    run(library().multiply_tokens, call)
    total = of_tokens(products, width, chunk)["p"]
    for part, (into, _) in zip(total.split(chunk.policy.widths, 1), grads.pairs, strict=False):
        if into is not None:
            into.add_(part) if scale is None else into.addcmul_(part, scale)


def _entries(factors: list[RowsAndEntries]) -> ctypes.Array[Factor]:
    out = (Factor * len(factors))()
    for factor, known in zip(out, factors, strict=True):
        entries = plain(known.entries)
        factor.entries, factor.entries_stride = entries.data_ptr(), entries.stride(0)
        factor.size, factor.half = entries.shape[1], entries.dtype == torch.bfloat16
    return out


def _tile(chunk: Chunk, m: Tensor | None = None) -> Tile:
    """The chunk's stored logits, or what was made of them in their place."""
    z = chunk.materialised[0].z
    return Tile(z.data_ptr(), None if m is None else m.data_ptr(), chunk.n_tokens, chunk.policy.head.rows)
