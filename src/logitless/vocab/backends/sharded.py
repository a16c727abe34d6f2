"""A backend over the rows that each rank has: the ranks' accumulations merge into that of the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from ...algebra.online_softmax import Accumulation, Totals, merge
from ...algebra.stats import Coefficients
from ..call.call import Call
from ..head.shard import VocabShard
from ..ranks.agreement import layout_of
from ..ranks.collectives import Ranks, in_order
from .base import Accumulated, Backend, Gradients, Partial
from .chunk import Chunk


class ShardedBackend(Backend):
    """The wrapped backend accumulates its rows; one collective for a chunk of tokens makes them the whole vocabulary's.

    The gradients are the wrapped backend's own: weight, bias and adapters get those of the rows here, and the pass
    adds up the ranks' gradients of hidden states. Slices are asked of the wrapped backend, before there is a chunk.
    """

    def __init__(self, local: Backend, shard: VocabShard, rows: int) -> None:
        self.local, self.few_rows, self.over_sets = local, local.few_rows, local.over_sets
        self.layout = layout_of(shard, rows)
        self.ranks = Ranks(shard.process_group)

    def prepared(self, chunk: Chunk) -> object:
        return self.local.prepared(chunk)

    def accumulate_local(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Partial:
        return self.local.accumulate_local(chunk, bases, keep)

    def accumulate(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Accumulated:
        label_first = "above" in chunk.sums  # entries are counted against it
        if label_first and chunk.label_logit is not None:
            (chunk.label_logit,) = self.ranks.total([chunk.label_logit])
        partial = self.accumulate_local(chunk, bases, keep)
        sent = dict(partial.state.items())
        if partial.zsum is not None:
            sent["zsum"] = partial.zsum
        if chunk.inputs.candidates is not None:
            sent["candidates"] = chunk.policy.at(chunk.inputs.candidates)
        if partial.topk is not None:
            sent["logits"], sent["ids"] = partial.topk[0], partial.topk[1] + chunk.policy.head.vocab_start
        if chunk.label_logit is not None and not label_first:
            sent["label_logit"] = chunk.label_logit
        if chunk.label_ref is not None:
            sent["label_ref"] = chunk.label_ref
        got = dict(zip(sent, self.ranks.gather_all([*sent.values()]), strict=True))
        for name in ("label_logit", "label_ref"):
            if name in got:  # which one rank has, and the others have 0 for
                setattr(chunk, name, in_order(got[name].unbind(0)))
        whole = self.finished(chunk, self._merged(chunk, partial, got))
        whole.candidates = in_order(got["candidates"].unbind(0)) if "candidates" in got else None
        return whole

    def scatters_once(self, call: Call) -> bool:
        return self.local.scatters_once(call)

    def finish(self, state: Accumulation, label: tuple[Tensor, Tensor | None] | None) -> Totals:
        return self.local.finish(state, label)

    def second_sums(self, chunk: Chunk, totals: Totals) -> dict[str, Tensor]:
        sums = self.local.second_sums(chunk, totals)
        return dict(zip(sums, self.ranks.total(list(sums.values())), strict=True))

    def logits_grad(self, chunk: Chunk, totals: Totals, coefficients: Coefficients, grads: Gradients) -> None:
        self.local.logits_grad(chunk, totals, coefficients, grads)

    def at_label(self, coefficients: Coefficients, totals: Totals, beta: float) -> Tensor:
        return self.local.at_label(coefficients, totals, beta)

    def scaled(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        return self.local.scaled(x, factor, dtype)

    def _merged(self, chunk: Chunk, partial: Partial, got: dict[str, Tensor]) -> Partial:
        """What all ranks' accumulations are together; ranks without rows are left out."""
        names = [name for name, _ in partial.state.items()]
        states = [Accumulation(**{name: got[name][rank] for name in names}) for rank in self.layout.holding]
        out = replace(partial, state=reduce(lambda x, y: merge(x, y, torch), states))
        if partial.zsum is not None:
            out.zsum = in_order(got["zsum"].unbind(0))
        if partial.topk is not None:
            out.topk = self._topk(got["logits"], got["ids"], chunk.top_k)
        return out

    def _topk(self, logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best of all ranks' best, (R, C, k) each; of equal ones the lowest ids, which come first."""
        pairs = [(rank, min(k, self.layout.rows[rank])) for rank in self.layout.holding]
        values, order = torch.cat([logits[r, :, :n] for r, n in pairs], 1).sort(dim=1, descending=True, stable=True)
        columns = torch.cat([ids[r, :, :n] for r, n in pairs], 1).gather(1, order)
        return values[:, :k].contiguous(), columns[:, :k].contiguous()
