"""A backend over the rows that each rank holds: the parts of all ranks merge into the fold of the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...algebra.fold import Fold, Totals, merge
from ...errors import BackendError
from ..head.shard import VocabShard
from ..ranks.agreement import layout_of
from ..ranks.collectives import Ranks, in_order
from .base import Chunk, Folded, Part, put_mixture


class Parallel:
    """The wrapped backend folds its rows; one collective for a chunk of tokens makes them the whole vocabulary's.

    `unfold` is the wrapped backend's own: weight, bias and adapters get the gradients of the rows here, and the
    engine adds up the ranks' gradients of hidden states.
    """

    def __init__(self, local: ModuleType, shard: VocabShard, rows: int) -> None:
        if not hasattr(local, "part"):
            name = local.__name__.rsplit(".", 1)[-1]
            raise BackendError(f"backend: expected one that folds a part of a sharded head, got {name!r}; pass 'eager'")
        self.local: Any = local
        self.layout = layout_of(shard, rows)
        self.ranks = Ranks(VocabShard.parse(shard.key).group)
        self.unfold, self.label_coefficient = local.unfold, local.label_coefficient

    def fold(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Folded:
        """The wrapped backend's `fold` of all ranks' rows."""
        first = "above" in chunk.sums and chunk.label is not None  # entries are counted against it
        if first:
            chunk.label = self._label(self.ranks.gather_all(_flat(chunk.label)))
        part = self.local.part(chunk, bases, keep)
        if chunk.reference is not None and part.fold.shift is None:  # no row here
            part.fold.shift = torch.zeros_like(part.fold.m)
        sent = dict(part.fold.items())
        if part.zsum is not None:
            sent["zsum"] = part.zsum
        if chunk.inputs.candidates is not None:
            sent["candidates"] = chunk.policy.at(chunk.inputs.candidates)
        if part.best is not None:
            sent["logits"], sent["ids"] = part.best[0], part.best[1] + chunk.policy.head.first
        label = [] if first else _flat(chunk.label)
        (*each,) = self.ranks.gather_all([*sent.values(), *label])
        got = dict(zip(sent, each, strict=False))
        if label:
            chunk.label = self._label(each[len(sent) :])
        whole = self._merged(chunk, part, got).folded(chunk)
        whole.candidates = in_order(got["candidates"].unbind(0)) if "candidates" in got else None
        return whole

    def second_look(self, chunk: Chunk, totals: Totals) -> None:
        """The wrapped backend's, over all ranks' rows."""
        jsd, kl_mixture = self.ranks.total(list(self.local.mixture_sums(chunk, totals)))
        put_mixture(chunk, totals, jsd, kl_mixture)

    def _label(self, each: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The label's logits, which one rank has and the others have 0 for."""
        mine = [in_order(x.unbind(0)) for x in each]
        return mine[0], mine[1] if len(mine) == 2 else None

    def _merged(self, chunk: Chunk, part: Part, got: dict[str, Tensor]) -> Part:
        """The part that all ranks' parts are together; ranks without rows are left out."""
        names = [name for name, _ in part.fold.items()]
        folds = [Fold(**{name: got[name][rank] for name in names}) for rank in self.layout.holding]
        out = replace(part, fold=reduce(lambda x, y: merge(x, y, torch), folds))
        if part.zsum is not None:
            out.zsum = in_order(got["zsum"].unbind(0))
        if part.best is not None:
            out.best = self._best(got["logits"], got["ids"], chunk.top_k)
        return out

    def _best(self, logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best of all ranks' best, (R, C, k) each; of equal ones the lowest ids, which come first."""
        pairs = [(rank, min(k, self.layout.rows[rank])) for rank in self.layout.holding]
        values, order = torch.cat([logits[r, :, :n] for r, n in pairs], 1).sort(dim=1, descending=True, stable=True)
        columns = torch.cat([ids[r, :, :n] for r, n in pairs], 1).gather(1, order)
        return values[:, :k].contiguous(), columns[:, :k].contiguous()


def _flat(label: tuple[Tensor, Tensor | None] | None) -> list[Tensor]:
    return [] if label is None else [x for x in label if x is not None]
