"""Some of a chunk's tokens, gathered: those that a slice still has."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .chunk import Chunk, Scratch, Tile
from .logits import Factor, Projection, of_tokens


class Take:
    """Rows of a chunk's tensors, in reused buffers."""

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
        out.inner, out.outer, out.row_scale = (of_tokens(x, self.rows) for x in (p.inner, p.outer, p.row_scale))
        return out

    def factor(self, f: Factor, name: str) -> Factor:
        out = copy(f)
        out.tokens = self(f.tokens, "tokens" + name)
        out.rows = out.tokens if f.rows is f.tokens else self(f.rows, "rows" + name)
        out.late = of_tokens(f.late, self.rows)
        return out

    def tile(self, tile: Tile | None) -> Tile | None:
        return None if tile is None else replace(tile, z=self(tile.z, "z"), m=of_tokens(tile.m, self.rows))
