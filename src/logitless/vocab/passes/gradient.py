"""The gradient of one chunk from the statistics' upstream gradients: dense bases, label, one-hots, constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...algebra.fold import Totals
from ...algebra.stats import Slope, slopes
from ..backends.base import Chunk, Folded, Grads
from ..backends.load import load
from ..backends.rows import add_at
from ..call.call import DIFFERENTIATED, Needs, Problem
from ..ranks.collectives import Ranks


def one_hots(problem: Problem, folded: Folded, part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids and logits of the entries that one-hot gradients go to, beside the label."""
    out = {}
    if folded.top_ids is not None and folded.top_logits is not None:
        out = {"top_ids": folded.top_ids, "top_logits": folded.top_logits}
    if "candidate_logits" in part and problem.spec.softcap:
        out["candidate_logits"] = part["candidate_logits"]
    return out


def unfold(
    backend: Any,
    problem: Problem,
    chunk: Chunk,
    totals: Totals,
    extra: dict[str, Tensor],
    stat_grads: dict[str, Tensor],
    grads: Grads,
    sums: Callable[[], list[Tensor]],
    products: dict[str, Tensor] | None = None,
) -> None:
    """The whole gradient of one chunk: dense bases, label, one-hots and the constant δ."""
    spec, policy = problem.spec, chunk.policy
    stat_grads = dict(stat_grads)
    sparse = {name: stat_grads.pop(name, None) for name in ("top_k_logits", "candidate_logits")}
    slope = slopes(stat_grads, totals, policy.head.rows, spec.jsd_beta, torch)
    dense = dict(slope)
    if "logprob" in dense:
        g = dense.pop("logprob")
        dense["p"] = dense["p"] - g if "p" in dense else -g
    if products is not None:
        _combine(chunk, dense, products, grads)
    else:
        backend.unfold(chunk, totals, dense, grads)
    grads.clear()  # what had no part in the dense bases
    if chunk.inputs.labels is not None:
        coefficient = backend.label_coefficient(chunk, totals, slope)
        _scatter(chunk, chunk.inputs.labels[:, None], coefficient[:, None], grads)
    if "argmax" in slope:
        c = policy.chain(slope["argmax"], totals.m)
        _scatter(chunk, extra["top_ids"][:, :1], c[:, None], grads)
    if sparse["top_k_logits"] is not None:
        ids, logits = extra["top_ids"][:, : spec.top_k], extra["top_logits"][:, : spec.top_k]
        _scatter(chunk, ids, policy.chain(sparse["top_k_logits"], logits), grads)
    if sparse["candidate_logits"] is not None and chunk.inputs.candidates is not None:
        c = policy.chain(sparse["candidate_logits"], extra.get("candidate_logits"))
        _scatter(chunk, chunk.inputs.candidates, c, grads)
    if "one" in slope and policy.outer is None:
        _constant(sums(), chunk, policy.chain(slope["one"]), grads)


def _scatter(chunk: Chunk, ids: Tensor, coefficients: Tensor, grads: Grads) -> None:
    """Add the one-hot terms Σ_k c_k·[v = i_k]: ids (C, K), coefficients of hW (C, K); N·K·H work, no (C, K, H)."""
    held = chunk.policy.head.held
    if held == 0:
        return
    ids, mine = chunk.policy.place(ids)
    if mine is not None:  # entries of other ranks add 0, to all rows in turn: what goes to one row is added serially
        ids = torch.where(mine, ids, torch.arange(ids.numel(), device=ids.device).view_as(ids) % held)
        coefficients = torch.where(mine, coefficients, 0.0)
    for factor, (tokens, entries) in zip(chunk.policy.factors, grads.pairs, strict=False):
        factor.scatter(ids, coefficients, tokens, entries)
    if grads.bias is not None:
        add_at(grads.bias, ids.flatten(), coefficients.flatten())


def _combine(chunk: Chunk, dense: Slope, products: dict[str, Tensor], grads: Grads) -> None:
    """The dense bases' share of dL/dhidden and dL/dlow from products that the fold made: a row scaling each."""
    widths = chunk.policy.widths
    for basis, c in dense.items():
        if basis not in products:
            continue
        for part, (tokens, _) in zip(products[basis].split(widths, 1), grads.pairs, strict=False):
            if tokens is not None:
                tokens.addcmul_(part, chunk.policy.chain(c)[:, None])


def _constant(sums: list[Tensor], chunk: Chunk, delta: Tensor, grads: Grads) -> None:
    """The term δ, the same for every entry: rank one."""
    rows = chunk.policy.head.held
    for factor, total, (tokens, entries) in zip(chunk.policy.factors, sums, grads.pairs, strict=False):
        if tokens is not None:
            tokens.addcmul_(total[None, :], delta[:, None])
        if entries is not None:
            entries[:rows] += torch.mv(factor.tokens.to(delta.dtype).t(), delta)
    if grads.bias is not None:
        grads.bias[:rows] += delta.sum()


class Accumulator:
    """The gradients of a whole problem: per entry in the compute dtype, per token written chunk by chunk."""

    def __init__(self, problem: Problem, needs: Needs) -> None:
        i = problem.inputs
        self.problem, self.compute = problem, problem.compute
        # fp16 would underflow before the loss scale arrives; ranks add their parts before these are rounded
        keeps = i.hidden.dtype == torch.float16 or problem.shard is not None
        narrow = self.compute if keeps else i.hidden.dtype
        pairs = zip(i[:DIFFERENTIATED], needs.flags, strict=True)
        hidden, weight, bias, low, up = (x if wanted else None for x, wanted in pairs)
        wide = self.compute
        self.total = Grads(_zeros(hidden, narrow), None, _zeros(bias, wide), _zeros(low, wide), _zeros(up, wide))
        if weight is not None:  # large: its first part is written over nothing, not added to zeros
            self.total.weight = torch.empty_like(weight, dtype=wide)
            self.total.blank.append(self.total.weight)

    def chunk(self, n_tokens: int) -> Grads:
        def zeros(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.zeros(n_tokens, x.shape[1], dtype=self.compute, device=x.device)

        return replace(self.total, hidden=zeros(self.total.hidden), low=zeros(self.total.low))

    def put(self, rows: slice, grads: Grads) -> None:
        for whole, part in ((self.total.hidden, grads.hidden), (self.total.low, grads.low)):
            if whole is not None and part is not None:
                self.problem.put(whole, rows, part)

    def scale_(self, factor: Tensor) -> None:
        """Multiply by a scalar, in place."""
        self.total.clear()
        for x in self.total.all:
            if x is not None:
                load(self.problem.spec.backend).scale_(x, factor)

    def result(self) -> tuple[Tensor | None, ...]:
        """(dhidden, dweight, dbias, dlow, dup) as autograd takes them, those of tokens added up over ranks; once."""
        self.total.clear()
        ranks = Ranks.of(self.problem.shard)
        if ranks is not None:
            for x in (self.total.hidden, self.total.low):
                if x is not None:
                    ranks.add_(x)
        pairs = zip(self.total.all, self.problem.inputs[:DIFFERENTIATED], strict=True)
        return tuple(None if x is None or i is None else x.to(_gradient_dtype(i, x.dtype)) for x, i in pairs)


def _zeros(like: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if like is None else torch.zeros_like(like, dtype=dtype)


def _gradient_dtype(x: Tensor, summed: torch.dtype) -> torch.dtype:
    """The dtype of a tensor's gradient: its own, unless its `grad_dtype` says another, or any (None)."""
    return (getattr(x, "grad_dtype", x.dtype) or summed) if x.is_leaf else x.dtype
