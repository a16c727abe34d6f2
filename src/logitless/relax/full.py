"""Gumbel-softmax over the whole vocabulary: soft embeddings in one pass, whose (N, V) weights never exist."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..vocab.face import LMHead, Noise, add_at, check_logits, full_precision
from .rows import first_order
from .terms import Sliced, Terms, slices_for
from .tokens import SoftTokens

LOWEST = -1e30  # the maximum of no entry


@dataclass(frozen=True)
class _Call(Sliced):
    """Softmax((z + g) / tau)·table for each table."""

    n_tables: int
    tau: float
    hard: bool

    def split(self, tensors: Sequence[Tensor]) -> tuple[Terms, list[Tensor]]:
        n = len(tensors) - self.n_tables
        return self.form.holding(tensors[:n]), list(tensors[n:])


def soft_whole(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    tau: float,
    noise: Noise,  # (...) each
    embeddings: tuple[Tensor, ...],
    hard: bool,
    memory_budget: int | None,
) -> SoftTokens:
    """`gumbel_topk` with k=0, its arguments checked."""
    lead, n = hidden.shape[:-1], math.prod(hidden.shape[:-1])
    terms = Terms.of(hidden.reshape(n, head.hidden_size), head)
    dtype = terms.xs[0].dtype
    slices = slices_for(terms, embeddings, memory_budget)
    call = _Call(terms.holding(()), slices, len(embeddings), tau, hard)
    seeds, positions = (x.reshape(n) for x in noise)
    token, *soft = _Whole.apply(call, seeds, positions, *terms.tensors, *embeddings)  # type: ignore[misc]
    none = hidden.new_zeros(*lead, 0, dtype=dtype)
    embedded = tuple(x.view(*lead, x.shape[1]) for x in soft)
    outside = torch.zeros(lead, dtype=dtype, device=hidden.device)
    return SoftTokens(none.long(), none, token.view(lead), outside, head.rows, head.padded_rows, embedded, embeddings)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, seeds: Tensor, positions: Tensor, *tensors: Tensor) -> Any:
        noise = Noise(seeds, positions)
        terms, tables = call.split(tensors)
        with full_precision(seeds.device.type):
            token, best, total, soft = _accumulate(call, terms, noise, tables)
        check_logits(best + total.log())
        ctx.call = call
        ctx.save_for_backward(seeds, positions, token, best, total, *soft, *tensors)
        ctx.mark_non_differentiable(token)
        rows = [t[token] for t in tables] if call.hard else [x.to(t.dtype) for x, t in zip(soft, tables, strict=True)]
        return token, *rows

    @staticmethod
    def backward(ctx: Any, _token: Any, *ups: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        first_order(*ups)
        seeds, positions, token, best, total, *rest = ctx.saved_tensors
        soft, tensors = rest[: len(ups)], rest[len(ups) :]
        back = _Backward(ctx.call, Noise(seeds, positions), token, best, total, tensors, ctx.needs_input_grad[3:])
        with full_precision(seeds.device.type):
            return None, None, None, *back.run(soft, [g.to(best.dtype) for g in ups])


def _accumulate(
    call: _Call, terms: Terms, noise: Noise, tables: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Per token the noisy best entry, its z + g, Σ exp((z + g - best) / tau), and the soft row of each table."""
    x = terms.xs[0]
    token = noise.seeds.new_zeros(x.shape[0])
    most, mass = x.new_full(token.shape, LOWEST), x.new_zeros(token.shape)
    soft = [x.new_zeros(x.shape[0], t.shape[1]) for t in tables]
    frozen = [False] * len(terms.tensors)
    for rows in call.chunks(x.shape[0]):
        best, total, at = most[rows], mass[rows], token[rows]
        for v in call.vocabulary():
            y = terms.holding(terms.leaves(rows, v, frozen)).logits()
            peak, where = y.add_(noise.rows(rows).gumbel(v)).max(1)
            at.copy_(torch.where(peak > best, where + v.start, at))
            new = torch.maximum(best, peak)
            grow = ((best - new) / call.tau).exp_()
            w = y.sub_(new[:, None]).div_(call.tau).exp_()
            total.mul_(grow).add_(w.sum(1))
            for sums, table in zip(soft, tables, strict=True):
                sums[rows] = torch.addmm(sums[rows] * grow[:, None], w, table[v].to(w.dtype))
            best.copy_(new)
        for sums in soft:
            sums[rows] /= total[:, None]
    return token, most, mass, soft


@dataclass
class _Backward:
    """dL/dz = p·(dL/dp - Σ p·dL/dp) / tau slice by slice, p recomputed, and from there what autograd makes of it."""

    call: _Call
    noise: Noise
    token: Tensor
    best: Tensor
    total: Tensor
    tensors: list[Tensor]
    needed: Sequence[bool]

    def run(self, soft: list[Tensor], ups: list[Tensor]) -> list[Tensor | None]:
        """The gradients of `tensors` for the upstream gradients of the soft rows."""
        terms, tables = self.call.split(self.tensors)
        n = len(terms.tensors)
        total = [
            torch.zeros(t.shape, dtype=self.best.dtype, device=t.device) if need else None
            for t, need in zip(self.tensors, self.needed, strict=True)
        ]
        center = torch.stack([(g * e).sum(1) for g, e in zip(ups, soft, strict=True)]).sum(0)
        for rows in self.call.chunks(self.best.shape[0]):
            some = [g[rows] for g in ups]
            for v in self.call.vocabulary():
                self._add(terms, tables, total, rows, v, some, center[rows])
        if self.call.hard:
            for g, into in zip(ups, total[n:], strict=True):
                if into is not None:
                    add_at(into, self.token, g)
        return [None if g is None else g.to(t.dtype) for g, t in zip(total, self.tensors, strict=True)]

    def _add(
        self,
        terms: Terms,
        tables: list[Tensor],
        total: list[Tensor | None],
        rows: slice,
        v: slice,
        ups: list[Tensor],  # (C, E) each
        center: Tensor,  # (C,)
    ) -> None:
        n = len(terms.tensors)
        leaves = terms.leaves(rows, v, self.needed[:n])
        with torch.enable_grad():
            z = terms.holding(leaves).logits()
        p = self.noise.rows(rows).gumbel(v).add(z.detach()).sub_(self.best[rows, None])
        p.div_(self.call.tau).exp_().div_(self.total[rows, None])
        if not self.call.hard:
            for g, into in zip(ups, total[n:], strict=True):
                if into is not None:
                    into[v].addmm_(p.T, g)
        if not z.requires_grad:
            return
        dp = center[:, None].neg()
        for g, table in zip(ups, tables, strict=True):
            dp = dp + g @ table[v].to(g.dtype).T
        terms.add_gradients(z, p.mul_(dp).div_(self.call.tau), leaves, total, rows, v)
