"""Weights of a loss that needs p alone, on a CPU: relative to a level that stays, and scaled in small tensors.

No slice but the first is looked at for its maximum, and none is multiplied by what its tokens' p is multiplied by: that
goes into the hidden states, and into what their products with the head add up to. docs/decisions/0048
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....algebra.online_softmax import Totals
from ...devices import bf16_products
from ..base import Gradients
from ..chunk import Chunk, Tile
from ..logits import add_product, exp_, product
from .threads import collect, shares_of, sums

MOST = 4096.0  # what a slice's weights may add up to: those of equal logits do to less, a level far too low to more
STEADY = {"zsum"}  # the sums, beside the weights', that do not ask for a slice's maximum
Each = list[Tensor | None]  # of the head's factors


def may_be_steady(chunk: Chunk) -> bool:
    """Whether a chunk's weights can do without the maximum of each slice: where asking for a number does not wait."""
    return _on_cpu(chunk) and chunk.sums <= STEADY


def weigh(z: Tensor, level: Tensor) -> Tensor | None:
    """Σw of a slice, (C,), whose logits become weights w = e^(z - level); None where the level is too low for one."""
    total = sums(exp_(z.sub_(level[:, None])))
    return total if total.amax().item() < MOST else None


def weigh_late(tile: Tile) -> Tensor:
    """The weights of a tile that has them, made now where they are to be made late."""
    if tile.late and tile.m is not None:
        exp_(tile.z.sub_(tile.m[:, None]))
        tile.late = False
    return tile.z


def holds_weights(chunk: Chunk) -> bool:
    """Whether `weights_grad` is for this chunk: where a CPU's operands are of the weights' dtype."""
    held = bool(chunk.materialised) and chunk.materialised[0].m is not None
    return held and _on_cpu(chunk) and all(f.dtype == chunk.policy.compute for f in chunk.policy.factors)


def scale_of(p: Tensor, level: Tensor, totals: Totals) -> Tensor:
    """What a token's weights relative to a level are multiplied by for its logits' gradient p·softmax, (C, 1)."""
    return (p * torch.exp((level - totals.m) - totals.log_s))[:, None]


def weights_grad(chunk: Chunk, totals: Totals, p: Tensor, grads: Gradients) -> None:
    """`Backend.logits_grad` from weights: what a token's p is multiplied by goes into small tensors."""
    level = chunk.materialised[-1].m
    assert level is not None
    scale = scale_of(p, level, totals)
    blank = grads.weight if grads.begins() else None  # whose first part is written, not added
    factors, pairs = chunk.policy.factors, grads.pairs[: len(chunk.policy.factors)]
    tokens = [None if x is None else torch.zeros_like(x) for x, _ in pairs]
    adding = [shares_of(x, chunk.slices.width) for x in tokens]
    entries = [y for _, y in pairs]
    scaled = [None if y is None else f.tokens * scale for f, y in zip(factors, entries, strict=True)]
    for tile in chunk.materialised:
        weigh_late(tile)
        if tile.m is not None and tile.m is not level:
            tile.z.mul_(torch.exp(tile.m - level)[:, None])
        if grads.bias is not None:
            grads.bias[tile.v] += torch.mul(tile.z, scale, out=chunk.scratch.take("w", tile.z)).sum(0)
        _add_products(chunk, tile, scaled, adding, entries, blank)
    for (into, _), total, shares in zip(pairs, tokens, adding, strict=True):
        collect(shares, total)
        if into is not None and total is not None:
            into.addcmul_(total, scale)


def _add_products(chunk: Chunk, tile: Tile, scaled: Each, adding: Each, entries: Each, blank: Tensor | None) -> None:
    """A slice's weights times the head into `adding`, times `scaled` into `entries`; returning frees the slice of W."""
    parts = chunk.policy.factors, chunk.policy.operand(tile.v), scaled, adding, entries
    for factor, part, own, into, rows in zip(*parts, strict=True):
        with bf16_products(factor.in_tiles):
            if into is not None:
                add_product(tile.z, part, into)
            if rows is not None and own is not None:
                put = product if rows is blank else add_product
                put(tile.z.t(), own, rows[tile.v])


def _on_cpu(chunk: Chunk) -> bool:
    return chunk.inputs.hidden.device.type == "cpu"
