"""The mean embedding under a head's distribution, with a sample, the best entry and the entropy, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..algebra.costs import DEFAULT_BUDGET, Slices, slices_of
from ..errors import ConfigError, OptionError
from ..vocab.face import LMHead, Noise, check_logits, explain, full_precision
from .full import LOWEST, TILES
from .rows import first_order
from .terms import Terms
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
    to which a tied embedding then has both gradients. noise, generator: as `sample_tokens` takes them; without either
    nothing is drawn, which saves the noise's time.
    Differentiable with respect to hidden, weight, bias, adapters and embedding.
    Price: 2·N·(H + D)·V flop; backward that again, and 2·N·H·V for each of dhidden and dweight, 2·N·D·V for dembedding.
    Raises what `token_stats` raises, ConfigError for a quantised or sharded head, and NotFiniteError.
    Memory: slices within the budget, two (N, D), and dweight and dembedding as these are; never (N, V).
    """
    table = _checked(hidden, head, embedding, temperature, memory_budget)
    lead, n = hidden.shape[:-1], math.prod(hidden.shape[:-1])
    draws = noise is not None or generator is not None
    some = Noise.of(tuple(lead), hidden.device, noise, generator)
    terms = Terms.of(hidden.reshape(n, head.hidden_size), head)
    dtype = terms.xs[0].dtype
    slices = slices_of(
        n,
        head.rows,
        budget=memory_budget or DEFAULT_BUDGET,
        device=hidden.device.type,
        itemsize=dtype.itemsize,
        tiles=TILES,
        converted=sum(t.shape[1] for t in (*terms.tables, table) if t.dtype != dtype),
    )
    call = _Call(terms.holding(()), head.rows, float(temperature), draws, slices)
    flat = (x.reshape(n) for x in some)
    mean, entropy, argmax, token = _Expected.apply(call, *flat, table, *terms.tensors)  # type: ignore[misc]
    return Expected(
        mean.view(*lead, table.shape[1]), entropy.view(lead), argmax.view(lead), token.view(lead) if draws else None
    )


def _checked(
    hidden: Tensor, head: LMHead, embedding: Tensor | None, temperature: float, memory_budget: int | None
) -> Tensor:
    """The table whose rows are mixed, after every argument was looked at."""
    if isinstance(head, LMHead) and head.shard is not None:
        raise ConfigError("expected_embedding: expected a whole head, got one that is sharded over ranks; gather it")
    explain(hidden, head, want=("entropy",), memory_budget=memory_budget)  # checks its arguments, computes nothing
    if isinstance(temperature, bool) or not isinstance(temperature, Real) or not 0 < temperature < math.inf:
        raise OptionError(f"temperature: expected a positive number, got {temperature!r}")
    table = head.weight_tensor if embedding is None else embedding
    if table is None:
        raise ConfigError("expected_embedding: expected a head of plain numbers, got a quantised one; dequantise it")
    check_table(table, head.rows, head.padded_rows, hidden.device)
    return table


@dataclass(frozen=True)
class _Call:
    """`form` is the head without its tensors, which autograd saves."""

    form: Terms
    vocab_size: int
    temperature: float
    draws: bool
    slices: Slices

    def chunks(self, n_tokens: int) -> Iterator[slice]:
        step = self.slices.tokens
        return (slice(n, min(n + step, n_tokens)) for n in range(0, n_tokens, step))

    def vocabulary(self) -> Iterator[slice]:
        size, width = self.vocab_size, self.slices.width
        return (slice(v, min(v + width, size)) for v in range(0, size, width))


class _Expected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, seeds: Tensor, positions: Tensor, table: Tensor, *tensors: Tensor) -> Any:
        terms = call.form.holding(tensors)
        n = terms.xs[0].shape[0]
        with full_precision(seeds.device.type):
            noise = Noise(seeds, positions)
            parts = [_accumulate(call, terms, noise, table, rows) for rows in call.chunks(n)]
        if parts:
            lse, mean, entropy, argmax, token = (torch.cat(each) for each in zip(*parts, strict=True))
        else:
            lse = entropy = terms.xs[0].new_zeros(0)
            mean, argmax, token = lse.new_zeros(0, table.shape[1]), seeds.clone(), seeds.clone()
        check_logits(lse)
        ctx.call = call
        ctx.save_for_backward(lse, mean, entropy, table, *tensors)
        ctx.mark_non_differentiable(argmax, token)
        return mean.to(table.dtype), entropy.clone(), argmax, token

    @staticmethod
    def backward(ctx: Any, up: Tensor, up_entropy: Tensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        first_order()
        lse, mean, entropy, table, *tensors = ctx.saved_tensors
        with full_precision(lse.device.type):
            found = _gradients(ctx.call, (lse, mean, entropy), table, tensors, up, up_entropy, ctx.needs_input_grad[3:])
        return None, None, None, *found


def _accumulate(
    call: _Call, terms: Terms, noise: Noise, table: Tensor, rows: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of a chunk of tokens: log-sum-exp, Σ p·E, entropy, the best entry and the noisy best."""
    x = terms.xs[0]
    n, frozen = rows.stop - rows.start, [False] * len(terms.tensors)
    m, noisy = x.new_full((n,), LOWEST), x.new_full((n,), -math.inf)
    s, t, mean = x.new_zeros(n), x.new_zeros(n), x.new_zeros(n, table.shape[1])
    noise = Noise(noise.seeds[rows], noise.positions[rows])
    argmax, token = noise.seeds.new_zeros(n), noise.seeds.new_zeros(n)
    for v in call.vocabulary():
        z = terms.holding(terms.leaves(rows, v, frozen)).logits().div_(call.temperature)
        peak, at = z.max(1)
        argmax = torch.where(peak > m, at + v.start, argmax)
        if call.draws:
            best, at = noise.gumbel(v).add_(z).max(1)
            token, noisy = torch.where(best > noisy, at + v.start, token), torch.maximum(noisy, best)
        new = torch.maximum(m, peak)
        grow, d = (m - new).exp_(), z.clamp_(min=LOWEST).sub_(new[:, None])
        w = d.exp()
        t = (t + s * (m - new)) * grow + d.mul_(w).sum(1)
        s = s * grow + w.sum(1)
        mean = torch.addmm(mean.mul_(grow[:, None]), w, table[v].to(w.dtype))
        m = new
    lse = torch.where(m <= LOWEST, math.nan, m + s.log())
    return lse, mean / s[:, None], (s.log() - t / s).clamp_(min=0), argmax, token


def _gradients(
    call: _Call,
    found: tuple[Tensor, Tensor, Tensor],
    table: Tensor,
    tensors: list[Tensor],
    up: Tensor,
    up_entropy: Tensor,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """dL/dz = (p·(g·E - Σ p·(g·E)) - h·p·(log p + entropy)) / temperature slice by slice, of g and h, the gradients of
    mean and entropy; and from there those of the table and the head's tensors."""
    lse, mean, entropy = found
    terms, g = call.form.holding(tensors), up.to(lse.dtype)
    total = [
        torch.zeros(x.shape, dtype=lse.dtype, device=x.device) if need else None
        for x, need in zip((table, *tensors), needed, strict=True)
    ]
    center = (g * mean).sum(1)
    for rows in call.chunks(lse.shape[0]):
        for v in call.vocabulary():
            leaves = terms.leaves(rows, v, needed[1:])
            with torch.enable_grad():
                z = terms.holding(leaves).logits()
            log_p = (z.detach() / call.temperature).clamp_(min=LOWEST).sub_(lse[rows, None])
            p = log_p.exp()
            if total[0] is not None:
                total[0][v].addmm_(p.T, g[rows])
            if not z.requires_grad:
                continue
            dz = torch.addmm(center[rows, None], g[rows], table[v].to(g.dtype).T, beta=-1)
            dz.sub_(log_p.add_(entropy[rows, None]).mul_(up_entropy[rows, None])).mul_(p).div_(call.temperature)
            terms.add_gradients(z, dz, leaves, total[1:], rows, v)
    return [None if x is None else x.to(y.dtype) for x, y in zip(total, (table, *tensors), strict=True)]
