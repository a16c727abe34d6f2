"""The backward pass over what counts of a chunk: which slices each token leaves out, and the others' rows gathered."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...algebra.fold import Totals
from ...algebra.stats import Slope
from ..sparse import BOUNDED, SparseBackward
from .tiles import Factor, Projection

if TYPE_CHECKING:
    from .chunk import Chunk, Grads, Scratch, Tile

WHOLE = 0.9  # of a chunk's tokens, from which on a slice takes all of them: gathering costs more


class Share(NamedTuple):
    """A slice's part of each token's sums, (C,) each, w = e^(z-m)."""

    m: Tensor
    w: Tensor  # Σw
    t: Tensor | None  # Σw·(z-m), where entropy is wanted


@dataclass
class Skip:
    """What a chunk's backward pass leaves out."""

    kept: Tensor  # (C, J), whether a token takes part in the products of a slice
    mass: Tensor  # (C,), what a token leaves out
    report: SparseBackward

    @classmethod
    def of(cls, shares: list[Share], totals: Totals, report: SparseBackward) -> Skip:
        """Of each token the slices of least mass, while their sum keeps to the bound."""
        mass = masses(shares, totals)
        ordered, order = mass.sort(1)
        keeps = ~(ordered.cumsum(1) <= report.bound)  # NaN keeps
        kept = torch.zeros_like(keeps).scatter_(1, order, keeps)
        kept |= kept.sum(0) > WHOLE * kept.shape[0]
        return cls(kept, mass.masked_fill_(kept, 0.0).sum(1), report)

    @classmethod
    def saved(cls, extra: dict[str, Tensor], report: SparseBackward | None) -> Skip | None:
        """From what `items` gave."""
        return None if report is None else cls(extra["kept_slices"], extra["skipped_mass"], report)

    def items(self) -> dict[str, Tensor]:
        """What has to wait for backward."""
        return {"kept_slices": self.kept, "skipped_mass": self.mass}

    def rows(self, chunk: Chunk, slope: Slope) -> list[Tensor | None]:
        """The tokens of each slice, None where they are all of the chunk's; and the report's part of this chunk."""
        weight = torch.stack([slope[basis].abs() for basis in sorted(BOUNDED & slope.keys())]).sum(0)
        kept = (self.kept & (weight != 0)[:, None]).t().contiguous()
        counts = kept.sum(1).tolist()  # the one wait for the device
        computed = sum(count * (v.stop - v.start) for count, v in zip(counts, chunk.vocabulary(), strict=True))
        n = chunk.n_tokens
        self.report.add(self.mass, weight, computed, n * chunk.policy.head.held)
        rows = torch.nonzero_static(kept.view(-1), size=sum(counts)).squeeze(1).remainder_(n).split(counts)
        return [None if x.shape[0] == n else x for x in rows]


def masses(shares: list[Share], totals: Totals) -> Tensor:
    """Each token's mass in each slice, (C, J): Σp, or Σ p·|log p| where that is asked for and more."""
    offset = torch.stack([share.m for share in shares], 1)
    offset.sub_(totals.m[:, None]).sub_(totals.log_s[:, None])  # log p = (z - m) + offset
    w = torch.stack([share.w for share in shares], 1)
    sharp = [share.t for share in shares if share.t is not None]
    if sharp:
        torch.maximum(w, torch.stack(sharp, 1).addcmul_(w, offset).neg_(), out=w)
    return w.mul_(offset.exp_())


def unfold(
    chunk: Chunk,
    totals: Totals,
    slope: Slope,
    grads: Grads,
    add_slice: Callable[[Chunk, slice, Tile | None, Totals, Slope, Grads], None],
) -> None:
    """`add_slice` for the tokens that each slice still has."""
    assert chunk.skip is not None
    for i, (v, rows) in enumerate(zip(chunk.vocabulary(), chunk.skip.rows(chunk, slope), strict=True)):
        tile = chunk.kept[i] if chunk.kept else None
        if rows is None:
            add_slice(chunk, v, tile, totals, slope, grads)
        elif rows.shape[0]:
            take = _Take(chunk.scratch, rows)
            numbers = Totals(**{name: x[rows] for name, x in totals.items()})
            own = replace(grads, hidden=take(grads.hidden, "own"), low=take(grads.low, "own low"))
            add_slice(take.chunk(chunk), v, take.tile(tile), numbers, {b: c[rows] for b, c in slope.items()}, own)
            for whole, part in ((grads.hidden, own.hidden), (grads.low, own.low)):
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
        return replace(chunk, inputs=inputs, policy=policy, reference=None, kept=[], skip=None)

    def projection(self, p: Projection) -> Projection:
        out = copy(p)
        out.factors = [self.factor(f, str(i)) for i, f in enumerate(p.factors)]
        out.inner, out.outer, out.slope = (self.column(x) for x in (p.inner, p.outer, p.slope))
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
