"""Gumbel-softmax over the k best entries of a head's distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..algebra.options import whole_within
from ..algebra.rules import TEMPERATURES, is_temperature
from ..errors import NotFiniteError, OptionError
from ..vocab.face import Call, LMHead, Noise, check_hidden, check_logits, flatten, on_all, token_stats
from .full import soft_whole
from .terms import Terms, agree
from .tokens import SoftTokens, check_table, soft_embedding


@torch.compiler.disable(reason="logitless: gumbel_topk breaks the graph; leave fullgraph=True out")
def gumbel_topk(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    tau: float,
    *,
    k: int = 256,
    hard: bool = False,
    generator: torch.Generator | None = None,
    noise: Noise | None = None,
    embeddings: tuple[Tensor, ...] = (),  # (V, E) each
    memory_budget: int | None = None,
) -> SoftTokens:
    """A differentiable sample of the next token: softmax((z + g) / tau) over the k best logits, g Gumbel noise.

    Dense equivalent, which a widely copied implementation scatters back to (..., V):

        z, ids = F.linear(hidden, head.weight).topk(k)
        weights = ((z + g) / tau).softmax(-1)
        token = ids.gather(-1, (z + g).argmax(-1, keepdim=True))[..., 0]
        if hard:
            weights = F.one_hot((z + g).argmax(-1), k) + weights - weights.detach()

    tau: a positive number; k: 0 is the whole vocabulary, whose weights never exist: give the tables whose soft rows are
    wanted as `embeddings`, read `.embedded`. hard: the forward weights are one-hot, the gradient is the soft weights'.
    noise: the sequences' own seeds and the positions, so that no slice, rank or batch order changes a token; without
    it, seeds are drawn from `generator` (under activation checkpointing give `noise`: recomputation draws anew).
    Differentiable with respect to hidden, head and its adapters (and weights to tables); adapters' dropout changes the
    logits, not which entries are the k best; which ids are the best has no gradient. Of a head that is sharded over
    ranks every rank gets the same tokens (k=0 is refused).
    Price: one GEMM of 2·N·H·V flop, without gradient, for the ids; 2·N·k·H for the logits, and again for each of
    dhidden and dweight. k=0: 2·N·(H + ΣE)·V; backward that again, and 2·N·H·V for each of the two.
    Raises what `token_stats` raises, and OptionError, NotFiniteError. Memory: slices within the budget, O(N·k); dweight
    as the weight. Gumbel-softmax: Jang et al., arXiv 1611.01144; straight-through: Bengio et al., arXiv 1308.3432;
    for alignment: GRADE, arXiv 2601.11574.
    """

    def arguments() -> tuple[Call, Noise]:
        call = _check(hidden, head, tau, k, embeddings, memory_budget)
        return call, Noise.of(tuple(hidden.shape[:-1]), hidden.device, noise, generator)

    call, some = on_all(head, arguments)
    agree(call, f"gumbel_topk tau={tau} k={k} hard={hard}", some, noise is None)
    del call  # it may hold hidden states of its own
    if k == 0:
        return soft_whole(hidden, head, float(tau), some, embeddings, hard, memory_budget)
    tokens = _soft_best(hidden, head, float(tau), k, hard, some, memory_budget)
    return replace(tokens, embedded=tuple(soft_embedding(tokens, table) for table in embeddings), tables=embeddings)


def _soft_best(
    hidden: Tensor, head: LMHead, tau: float, k: int, hard: bool, noise: Noise, memory_budget: int | None
) -> SoftTokens:
    """Soft tokens over the k best entries, arguments checked."""
    steady = replace(head, adapters=tuple(replace(x, dropout=0.0) for x in head.adapters))
    with torch.no_grad():
        stats = token_stats(hidden, steady, want=("logsumexp",), top_k=k, memory_budget=memory_budget)
        check_logits(stats.logsumexp)
        outside = -torch.expm1((stats.top_k_logits.logsumexp(-1) - stats.logsumexp).clamp(max=0))
    return soft_at(hidden, head, tau, stats.top_k_ids, noise, hard=hard, outside=outside)


def soft_at(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    tau: float,
    ids: Tensor,  # (..., k)
    noise: Noise,
    *,
    hard: bool,
    outside: Tensor,  # (...)
    token: Tensor | None = None,  # (...)
) -> SoftTokens:
    """Soft tokens over entries that were chosen before; `token`, where given, is the noisy best of them."""
    flat = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1])
    z = Terms.of(hidden.reshape(flat.shape[0], head.hidden_size), head).at(flat).view(ids.shape)
    noisy = z + noise.gumbel(ids)
    weights = (noisy / tau).softmax(-1)
    if token is None:
        best = noisy.detach().argmax(-1, keepdim=True)
    else:
        best = (ids == token[..., None]).int().argmax(-1, keepdim=True)
    if hard:  # soft - soft is exactly 0: the forward weights are exactly one-hot
        weights = torch.zeros_like(weights).scatter(-1, best, 1.0) + (weights - weights.detach())
    return SoftTokens(ids, weights, ids.gather(-1, best).squeeze(-1), outside, head.rows, head.padded_rows)


def _check(
    hidden: Tensor, head: LMHead, tau: float, k: int, embeddings: tuple[Tensor, ...], memory_budget: int | None
) -> Call:
    """The checked call."""
    check_hidden(hidden, head)
    if not is_temperature(tau):
        raise OptionError(
            f"tau: expected a number in {TEMPERATURES}, got {tau!r}; small ones are nearly hard, large ones flat"
        )
    whole_within("k", k, 0, head.rows, "the vocabulary; 0 is all of it")
    if not isinstance(embeddings, tuple):
        raise OptionError(f"embeddings: expected a tuple of tables, got {type(embeddings).__name__}")
    if k == 0 and head.shard is not None:
        raise OptionError("k: expected the k best entries of a head that is sharded over ranks, got 0; pass k=256")
    if k == 0 and not embeddings:
        raise OptionError("embeddings: expected the tables whose soft rows are wanted with k=0, got none")
    for table in embeddings:
        check_table(table, head.rows, head.padded_rows, hidden.device)
    finite = hidden.detach().isfinite().all(-1)
    if not finite.all():
        wrong = finite.numel() - int(finite.sum())
        raise NotFiniteError(
            f"hidden: expected finite numbers, got NaN or infinity in {wrong} of {finite.numel()} tokens; "
            "the model has diverged"
        )
    return flatten(hidden, head, None, want=("logsumexp",), memory_budget=memory_budget)
