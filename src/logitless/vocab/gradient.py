"""The gradient of one chunk from the statistics' upstream gradients: dense bases, label, one-hots, constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..algebra.fold import Totals
from ..algebra.stats import Slope, slopes
from .backends.chunk import Chunk, Folded, Grads
from .problem import Problem
from .rows import add_at


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
