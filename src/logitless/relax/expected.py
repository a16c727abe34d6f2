"""The mean embedding under a head's distribution, with a sample, the best entry and the entropy, in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..algebra.rules import TEMPERATURES, is_temperature
from ..errors import OptionError
from ..vocab.face import (
    Call,
    LMHead,
    Noise,
    Ranks,
    VocabShard,
    best_of_all,
    check_logits,
    flatten,
    full_precision,
    on_all,
)
from .full import LOWEST
from .rows import first_order
from .terms import Sliced, Terms, agree, slices_for
from .tokens import check_table


@dataclass(frozen=True, eq=False)
class Expected:
    """What one pass over the vocabulary found, of the distribution at its temperature.

    embedding: (..., D) in the table's dtype, Σ p·E, and entropy: (...) fp32, in nats, both differentiable.
    argmax, token: (...) int64, the most likely entry, the lowest of equal ones, and a sample, as `sample_tokens` draws
    it; None where no noise was asked for.
    """

    embedding: Tensor
    entropy: Tensor
    argmax: Tensor
    token: Tensor | None


@torch.compiler.disable(reason="logitless: expected_embedding breaks the graph; leave fullgraph=True out")
def expected_embedding(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    embedding: Tensor | None = None,  # (V, D)
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    noise: Noise | None = None,
    memory_budget: int | None = None,
) -> Expected:
    """The embedding that a head's distribution has on average: softmax(z) · E, without softmax(z).

    Dense equivalent:

        z = softcap(scale * F.linear(hidden, weight, bias)) / temperature  # and the head's adapters
        p = z.softmax(-1)
        embedding = p @ E[: head.vocab_size]
        entropy, argmax = -(p * z.log_softmax(-1)).sum(-1), z.argmax(-1)
        token = (z + noise.gumbel(...)).argmax(-1)  # one draw from p

    What block-diffusion models feed back between denoising steps (self-conditioning, Chen et al., arXiv 2208.04202),
    and what training on soft tokens reads. embedding: any table with a row for each entry; None: the head's own weight,
    to which a tied embedding then has both gradients, in one tensor. Of a head that is split over ranks, embedding has
    this rank's rows, and every rank gets the whole mean. noise, generator: as `sample_tokens` takes them; without
    either nothing is drawn, which saves the noise's time.
    Differentiable with respect to hidden, weight, bias, adapters and embedding; a quantised weight is a constant.
    Price: 2·N·(H + D)·V flop; backward that again, and 2·N·H·V for each of dhidden and dweight, 2·N·D·V for dembedding.
    Raises what `token_stats` raises, and NotFiniteError.
    Memory: slices within the budget, two (N, D), and dweight and dembedding as these are; never (N, V).
    """
    draws = noise is not None or generator is not None

    def arguments() -> tuple[Call, Noise]:
        return _check(hidden, head, embedding, temperature, memory_budget), _noise_of(hidden, noise, generator)

    checked, some = on_all(head, arguments)
    lead, n = hidden.shape[:-1], math.prod(hidden.shape[:-1])
    alike = f"expected_embedding draws={draws} {_alike(temperature, embedding)}"
    agree(checked, alike, some, draws and noise is None)
    del checked  # it may hold hidden states of its own
    terms = Terms.of(hidden.reshape(n, head.hidden_size), head, packed=True)
    table = None if embedding is head.weight_tensor else embedding
    mixed = head.weight if table is None else table
    slices = slices_for(terms, () if table is None else (table,), memory_budget)
    call = _Call(terms.holding(()), slices, float(temperature), draws, mixed.dtype, mixed.shape[1])
    flat = (x.reshape(n) for x in some)
    mean, entropy, argmax, token = _Expected.apply(call, *flat, table, *terms.tensors)  # type: ignore[misc]
    return Expected(
        mean.view(*lead, call.width), entropy.view(lead), argmax.view(lead), token.view(lead) if draws else None
    )


def _check(
    hidden: Tensor, head: LMHead, embedding: Tensor | None, temperature: float, memory_budget: int | None
) -> Call:
    """The checked call."""
    call = flatten(hidden, head, None, want=("logsumexp",), memory_budget=memory_budget)
    if not is_temperature(temperature):
        raise OptionError(f"temperature: expected a number in {TEMPERATURES}, got {temperature!r}")
    if embedding is not None:
        check_table(embedding, head.local_rows, head.weight.shape[0], hidden.device)
    return call


def _alike(temperature: float, embedding: Tensor | None) -> str:
    """What ranks compare of these arguments: each has rows of its own of the table."""
    table = None if embedding is None else (embedding.dtype, embedding.shape[1], embedding.requires_grad)
    return f"temperature={temperature} embedding={table}"


def _noise_of(hidden: Tensor, noise: Noise | None, generator: torch.Generator | None) -> Noise:
    """A call's noise for each of its tokens; any where nothing is drawn, and torch's own generator stays as it is."""
    if noise is None and generator is None:
        zeros = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
        return Noise(zeros, zeros)
    return Noise.of(tuple(hidden.shape[:-1]), hidden.device, noise, generator)


@dataclass(frozen=True)
class _Call(Sliced):
    """dtype, width: of the rows that are mixed."""

    temperature: float
    draws: bool
    dtype: torch.dtype
    width: int

    @property
    def shard(self) -> VocabShard | None:
        return self.form.shard


class _Expected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, seeds: Tensor, positions: Tensor, table: Tensor | None, *tensors: Tensor) -> Any:
        terms = call.form.holding(tensors)
        n = terms.xs[0].shape[0]
        with full_precision(seeds.device.type):
            noise = Noise(seeds, positions)
            parts = [_accumulate(call, terms, noise, table, rows) for rows in call.chunks(n)]
        if parts:
            lse, mean, entropy, argmax, token = (torch.cat(each) for each in zip(*parts, strict=True))
        else:
            lse = entropy = terms.xs[0].new_zeros(0)
            mean, argmax, token = lse.new_zeros(0, call.width), seeds.clone(), seeds.clone()
        check_logits(lse)
        ctx.call = call
        ctx.save_for_backward(lse, mean, entropy, table, *tensors)
        ctx.mark_non_differentiable(argmax, token)
        return mean.to(call.dtype), entropy.clone(), argmax, token

    @staticmethod
    def backward(ctx: Any, up: Tensor, up_entropy: Tensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        first_order(up, up_entropy)
        lse, mean, entropy, table, *tensors = ctx.saved_tensors
        with full_precision(lse.device.type):
            found = _gradients(ctx.call, (lse, mean, entropy), table, tensors, up, up_entropy, ctx.needs_input_grad[3:])
        return None, None, None, *found


def _accumulate(
    call: _Call, terms: Terms, noise: Noise, table: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of a chunk of tokens: log-sum-exp, Σ p·E, entropy, the best entry and the noisy best."""
    x = terms.xs[0]
    n, frozen = rows.stop - rows.start, [False] * len(terms.tensors)
    m, noisy = x.new_full((n,), LOWEST), x.new_full((n,), -math.inf)
    s, t, mean = x.new_zeros(n), x.new_zeros(n), x.new_zeros(n, call.width)
    noise = noise.rows(rows)
    argmax, token = noise.seeds.new_zeros(n), noise.seeds.new_zeros(n)
    first = 0 if call.shard is None else call.shard.offset
    for v in call.vocabulary():
        leaves = terms.leaves(rows, v, frozen)
        z = terms.holding(leaves).logits().div_(call.temperature)
        peak, at = z.max(1)
        start = first + v.start
        argmax = torch.where(peak > m, at + start, argmax)
        if call.draws:
            best, at = noise.gumbel(slice(start, first + v.stop)).to(z.dtype).add_(z).max(1)
            token, noisy = torch.where(best > noisy, at + start, token), torch.maximum(noisy, best)
        new = torch.maximum(m, peak)
        grow, d = (m - new).exp_(), z.clamp_(min=LOWEST).sub_(new[:, None])
        w = d.exp()
        t = (t + s * (m - new)) * grow + d.mul_(w).sum(1)
        s = s * grow + w.sum(1)
        mean = torch.addmm(mean.mul_(grow[:, None]), w, _mixed(terms, leaves, table, v))
        m = new
    if call.shard is not None:
        argmax = best_of_all(argmax, m, call.shard)
        token = best_of_all(token, noisy, call.shard) if call.draws else token
        m, s, t = _of_all_ranks(call.shard, m, s, t, mean)
    lse = torch.where(m <= LOWEST, math.nan, m + s.log())
    return lse, mean / s[:, None], (s.log() - t / s).clamp_(min=0), argmax, token


def _mixed(terms: Terms, leaves: Sequence[Tensor], table: Tensor | None, v: slice) -> Tensor:
    """A slice of the rows that are mixed: of the table, or of the weight, which the logits have read."""
    weight = leaves[terms.n].detach()
    return weight if table is None else table[v].to(weight.dtype)


def _of_all_ranks(shard: VocabShard, m: Tensor, s: Tensor, t: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's sums relative to its own maximum as those over all ranks, `mean` in place."""
    ranks = Ranks(shard.process_group)
    top = ranks.gather(m).amax(0)
    grow = (m - top).exp()
    s, t = ranks.total([s * grow, (t + s * (m - top)) * grow])
    ranks.add_(mean.mul_(grow[:, None]))
    return top, s, t


def _gradients(
    call: _Call,
    found: tuple[Tensor, Tensor, Tensor],
    table: Tensor | None,
    tensors: list[Tensor],
    up: Tensor,
    up_entropy: Tensor,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """dL/dz = (p·(g·E - Σ p·(g·E)) - h·p·(log p + entropy)) / temperature slice by slice, of g and h, the gradients of
    mean and entropy; and from there those of the table and the head's tensors. A tied weight has both in one."""
    lse, mean, entropy = found
    terms, g = call.form.holding(tensors), up.to(lse.dtype)
    total = [
        torch.zeros(x.shape, dtype=lse.dtype, device=x.device) if need and x is not None else None
        for x, need in zip((table, *tensors), needed, strict=True)
    ]
    rows_grad = total[1 + terms.n] if table is None else total[0]
    center = (g * mean).sum(1)
    for rows in call.chunks(lse.shape[0]):
        for v in call.vocabulary():
            leaves = terms.leaves(rows, v, needed[1:])
            with torch.enable_grad():
                z = terms.holding(leaves).logits()
            log_p = (z.detach() / call.temperature).clamp_(min=LOWEST).sub_(lse[rows, None])
            p = log_p.exp()
            if rows_grad is not None:
                rows_grad[v].addmm_(p.T, g[rows])
            if not z.requires_grad:
                continue
            dz = torch.addmm(center[rows, None], g[rows], _mixed(terms, leaves, table, v).T, beta=-1)
            dz.sub_(log_p.add_(entropy[rows, None]).mul_(up_entropy[rows, None])).mul_(p).div_(call.temperature)
            terms.add_gradients(z, dz, leaves, total[1:], rows, v)
    if call.shard is not None:  # of what all ranks hold alike
        for x in total[1 : 1 + terms.n]:
            if x is not None:
                Ranks(call.shard.process_group).add_(x)
    return [None if x is None or y is None else x.to(y.dtype) for x, y in zip(total, (table, *tensors), strict=True)]
