"""The backward pass over what counts of a chunk: which slices each token leaves out, and the others' rows gathered."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....algebra.online_softmax import Totals
from ....algebra.stats import Coefficients
from ..base import Chunk, Gradients, Scratch, Tile
from ..logits import Factor, Projection


def logits_grad_of_some(
    chunk: Chunk,
    totals: Totals,
    coefficients: Coefficients,
    grads: Gradients,
    add_slice: Callable[[Chunk, slice, Tile | None, Totals, Coefficients, Gradients], None],
) -> None:
    """`add_slice` for the tokens that each slice still has."""
    assert chunk.skip is not None
    for i, (v, rows) in enumerate(zip(chunk.vocabulary(), chunk.skip.rows(chunk, coefficients), strict=True)):
        tile = chunk.materialised[i] if chunk.materialised else None
        if rows is None:
            add_slice(chunk, v, tile, totals, coefficients, grads)
        elif rows.shape[0]:
            take = _Take(chunk.scratch, rows)
            some = {basis: c[rows] for basis, c in coefficients.items()}
            numbers = Totals(**{name: x[rows] for name, x in totals.items()})
            own = replace(
                grads, hidden=take(grads.hidden, "own"), lora_hidden=take(grads.lora_hidden, "own lora_hidden")
            )
            add_slice(take.chunk(chunk), v, take.tile(tile), numbers, some, own)
            for whole, part in ((grads.hidden, own.hidden), (grads.lora_hidden, own.lora_hidden)):
                if whole is not None and part is not None:
                    whole.index_copy_(0, rows, part)


class _Take:
    """Some of a chunk's tokens, gathered into reused buffers."""

    def __init__(self, scratch: Scratch, rows: Tensor) -> None:
        self.scratch, self.rows = scratch, rows

    def __call__(self, x: Tensor | None, name: str) -> Any:
        """Rows of (C, K)."""
        if x is None or x.dtype != self.scratch.dtype:
            return None if x is None else x.index_select(0, self.rows)
        out = self.scratch.take(name, (self.rows.shape[0], x.shape[1]))
        return torch.index_select(x, 0, self.rows, out=out)

    def chunk(self, chunk: Chunk) -> Chunk:
        policy = self.projection(chunk.policy)
        labels = chunk.inputs.labels
        inputs = chunk.inputs._replace(
            hidden=policy.factors[0].tokens, labels=None if labels is None else labels[self.rows]
        )
        return replace(chunk, inputs=inputs, policy=policy, reference=None, materialised=[], skip=None)

    def projection(self, p: Projection) -> Projection:
        out = copy(p)
        out.factors = [self.factor(f, str(i)) for i, f in enumerate(p.factors)]
        out.inner, out.outer, out.row_scale = (self.column(x) for x in (p.inner, p.outer, p.row_scale))
        return out

    def factor(self, f: Factor, name: str) -> Factor:
        out = copy(f)
        out.tokens = self(f.tokens, "tokens" + name)
        out.rows = out.tokens if f.rows is f.tokens else self(f.rows, "rows" + name)
        out.late = self.column(f.late)
        return out

    def column(self, x: Any) -> Any:
        return x[self.rows] if isinstance(x, Tensor) else x

    def tile(self, tile: Tile | None) -> Tile | None:
        return None if tile is None else replace(tile, z=self(tile.z, "z"), m=self.column(tile.m))
