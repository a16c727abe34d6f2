"""The gradient of one chunk from the statistics' upstream gradients: dense bases, label, one-hots, constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...algebra.online_softmax import Totals
from ...algebra.stats import Coefficients, coefficients_of
from ..backends.base import Accumulated, Backend, Gradients
from ..backends.chunk import Chunk
from ..backends.rows import add_at
from ..call.call import DIFFERENTIATED, Call, Needs
from ..ranks.collectives import Ranks


def one_hots(call: Call, found: Accumulated, part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids and logits of the entries that one-hot gradients go to, beside the label."""
    out = {}
    if found.top_ids is not None and found.top_logits is not None:
        out = {"top_ids": found.top_ids, "top_logits": found.top_logits}
    if "candidate_logits" in part and call.head.softcap:
        out["candidate_logits"] = part["candidate_logits"]
    return out


def add_gradient(
    backend: Backend,
    chunk: Chunk,
    totals: Totals,
    extra: dict[str, Tensor],
    stat_grads: dict[str, Tensor],
    grads: Gradients,
    sums: Callable[[], list[Tensor]],
    products: dict[str, Tensor] | None,
) -> None:
    """The whole gradient of one chunk: dense bases, label, one-hots and the constant δ.

    extra: what `one_hots` kept; stat_grads: of each statistic, (C, ...); sums: as `Pass.sums`; products: of the dense
    bases with the head, where these accumulated on the way.
    """
    policy, stat_grads = chunk.policy, dict(stat_grads)
    at_ids = {name: stat_grads.pop(name, None) for name in ("top_k_logits", "candidate_logits")}
    c = coefficients_of(stat_grads, totals, policy.head.rows, chunk.jsd_beta, torch)
    dense = without_label(c)
    if products is not None:
        _combine(chunk, dense, products, grads)
    else:
        backend.logits_grad(chunk, totals, dense, grads)
    grads.clear()  # what had no part in the dense bases
    if chunk.inputs.labels is not None:
        at_label = backend.label_coefficient(chunk, totals, c)
        scatter_one_hots(chunk, chunk.inputs.labels[:, None], at_label[:, None], grads)
    if "argmax" in c:
        at_best = policy.chain(c["argmax"], totals.m)
        scatter_one_hots(chunk, extra["top_ids"][:, :1], at_best[:, None], grads)
    if (upstream := at_ids["top_k_logits"]) is not None:
        k = upstream.shape[1]
        scatter_one_hots(chunk, extra["top_ids"][:, :k], policy.chain(upstream, extra["top_logits"][:, :k]), grads)
    if (upstream := at_ids["candidate_logits"]) is not None and chunk.inputs.candidates is not None:
        at_candidates = policy.chain(upstream, extra.get("candidate_logits"))
        scatter_one_hots(chunk, chunk.inputs.candidates, at_candidates, grads)
    if "one" in c and policy.outer is None:
        _constant(sums(), chunk, policy.chain(c["one"]), grads)


def without_label(c: Coefficients) -> Coefficients:
    """The coefficients of all entries but the label, where log-prob's is that of p alone."""
    out = dict(c)
    if "logprob" in out:
        g = out.pop("logprob")
        out["p"] = out["p"] - g if "p" in out else -g
    return out


def scatter_one_hots(
    chunk: Chunk, ids: Tensor, coefficients: Tensor, grads: Gradients, of: Tensor | None = None
) -> None:
    """Add the one-hot terms Σ_k c_k·[v = i_k]: ids (C, K), coefficients of hW (C, K); N·K·H work, no (C, K, H).

    of: where ids are (M, K), the token of each.
    """
    rows = chunk.policy.head.local_rows
    if rows == 0:
        return
    ids, mine = chunk.policy.place(ids)
    if mine is not None:  # entries of other ranks add 0, to all rows in turn: what goes to one row is added serially
        ids = torch.where(mine, ids, torch.arange(ids.numel(), device=ids.device).view_as(ids) % rows)
        coefficients = torch.where(mine, coefficients, 0.0)
    for factor, (tokens, entries) in zip(chunk.policy.factors, grads.pairs, strict=False):
        factor.scatter(ids, coefficients, tokens, entries, of)
    if grads.bias is not None:
        add_at(grads.bias, ids.flatten(), coefficients.flatten())


def _combine(chunk: Chunk, dense: Coefficients, products: dict[str, Tensor], grads: Gradients) -> None:
    """The dense bases' share of dL/dhidden and dL/dlora_hidden, a row scaling of products that accumulated before."""
    widths = chunk.policy.widths
    for basis, c in dense.items():
        if basis not in products:
            continue
        factor = chunk.policy.chain(c)[:, None]
        for part, (tokens, _) in zip(products[basis].split(widths, 1), grads.pairs, strict=False):
            if tokens is not None:
                tokens.addcmul_(torch.where(factor == 0, 0.0, part) if chunk.may_be_infinite else part, factor)


def _constant(sums: list[Tensor], chunk: Chunk, delta: Tensor, grads: Gradients) -> None:
    """The term δ, the same for every entry, or times an entry's weight: rank one."""
    rows, weights = chunk.policy.head.local_rows, chunk.inputs.class_weights
    for factor, total, (tokens, entries) in zip(chunk.policy.factors, sums, grads.pairs, strict=False):
        if tokens is not None:
            tokens.addcmul_(total[None, :], delta[:, None])
        if entries is not None:
            row = torch.mv(factor.tokens.to(delta.dtype).t(), delta)
            entries[:rows].add_(row) if weights is None else entries[:rows].addr_(weights, row)
    if grads.bias is not None:
        grads.bias[:rows] += delta.sum() if weights is None else weights * delta.sum()


def summed_dtypes(call: Call) -> tuple[torch.dtype, ...]:
    """The dtypes that gradients are summed in, in the order of `Inputs`.

    fp16 has no range for what is still to be multiplied by an upstream loss scale. bf16 has: for fewer bytes a loss's
    hidden states are rounded before it and after it. Ranks add their parts before these are rounded.
    """
    hidden, compute = call.inputs.hidden.dtype, call.compute
    narrow = compute if hidden == torch.float16 or call.shard is not None else hidden
    return narrow, compute, compute, compute, compute


class GradientBuffers:
    """The gradients of a whole call: per entry in the compute dtype, per token written chunk by chunk.

    once: as a backend's `sums_once` says, with which the weight's is in the weight's own dtype.
    """

    def __init__(self, call: Call, backend: Backend, needs: Needs, once: bool = False) -> None:
        self.call, self.backend = call, backend
        dtypes, weight = list(summed_dtypes(call)), call.inputs.weight
        if once and weight is not None:
            dtypes[1] = weight.dtype
        pairs = zip(call.inputs[:DIFFERENTIATED], needs, dtypes, strict=True)
        # the weight's is large: its first part is written over nothing, not added to zeros
        hidden, weight, bias, lora_hidden, lora_b = (
            torch.empty_like(x, dtype=dtype) if wanted and x is not None else None for x, wanted, dtype in pairs
        )
        self.gradients = Gradients(hidden, weight, bias, lora_hidden, lora_b)
        for x in (hidden, bias, lora_hidden, lora_b):
            if x is not None:
                x.zero_()
        if weight is not None:
            weight[call.head.local_rows :].zero_()  # of padding
            self.gradients.unwritten.append(weight)

    def chunk(self, n_tokens: int) -> Gradients:
        """The sums for entries, and zeros for a chunk's tokens."""
        whole, dtype = self.gradients, self.call.compute

        def zeros(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.zeros(n_tokens, x.shape[1], dtype=dtype, device=x.device)

        return replace(whole, hidden=zeros(whole.hidden), lora_hidden=zeros(whole.lora_hidden))

    def put(self, rows: slice, grads: Gradients) -> None:
        """Write what a chunk's tokens got."""
        for whole, part in ((self.gradients.hidden, grads.hidden), (self.gradients.lora_hidden, grads.lora_hidden)):
            if whole is not None and part is not None:
                self.call.put(whole, rows, part)

    def summed(self) -> list[Tensor | None]:
        """The gradients in the dtypes that they were summed in, those of tokens added up over ranks; once."""
        self.gradients.clear()
        ranks = Ranks.of(self.call.shard)
        if ranks is not None:
            for x in (self.gradients.hidden, self.gradients.lora_hidden):
                if x is not None:
                    ranks.add_(x)
        return self.gradients.all

    def result(self, factor: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """`summed`, times a scalar, as autograd takes them; once."""

        def given(x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.to(dtype) if factor is None else self.backend.scaled(x, factor, dtype)

        pairs = zip(self.summed(), self.call.inputs[:DIFFERENTIATED], strict=True)
        return tuple(None if x is None or i is None else given(x, _gradient_dtype(i, x.dtype)) for x, i in pairs)


def _gradient_dtype(x: Tensor, summed: torch.dtype) -> torch.dtype:
    """The dtype of a tensor's gradient: its own, unless its `grad_dtype` says another, or any (None)."""
    return (x.grad_dtype or summed) if x.is_leaf else x.dtype
