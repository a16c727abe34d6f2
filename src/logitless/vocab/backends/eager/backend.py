"""The pass in plain torch, on any device."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ....algebra.online_softmax import EMPTY, MASK, Accumulation, Totals, moved_b, share_of_tail, step_to, times
from ....algebra.stats import Coefficients, mixture_logs, mixture_shares
from ..base import Backend, Chunk, Gradients, Partial, SliceMass, Tile, is_dense, normalised
from ..logits import LOG2E, Operands, add_product, exp_, logits_grad_dtype
from .skip import logits_grad_of_some
from .topk import TopK

NEARER = 2.0  # nats, of both heads' logits together, from which on differences are measured from another entry


class _Running:
    """The accumulation of a chunk, updated in place slice by slice."""

    def __init__(self, chunk: Chunk, bases: tuple[str, ...]) -> None:
        self.chunk = chunk
        z = torch.zeros(chunk.n_tokens, dtype=chunk.policy.compute, device=chunk.inputs.hidden.device)
        self.state = Accumulation(m=z + EMPTY, rest=z.clone())
        self.state.t = z.clone() if "t" in chunk.sums else None
        self.state.r = z.clone() if "r" in chunk.sums else None
        self.state.above = torch.zeros_like(z, dtype=torch.int64) if "above" in chunk.sums else None
        if chunk.reference is not None:
            self.state.m_ref, self.state.s_ref = z + EMPTY, z.clone()
            self.state.near, self.state.shift = z + EMPTY, z.clone()
            self.state.a, self.state.b = z.clone(), z.clone()
            self.state.a_ref = z.clone() if "qe" in chunk.sums else None
        if "tail" in chunk.sums:
            self.state.m_tail, self.state.s_tail = z + EMPTY, z.clone()
        self.zsum = z.clone() if chunk.sums_logits else None
        self.topk = TopK(z, chunk.top_k) if chunk.top_k else None
        self.widths = chunk.policy.widths
        self.products = {basis: z.new_zeros(chunk.n_tokens, sum(self.widths)) for basis in bases}
        self.w: Operands = ()  # the slice of W, and of the adapters
        self.flat: Tensor | None = None  # the softcap's derivative on the slice

    def add(self, tile: Tile, keep: str | None) -> None:
        """Take one slice in. `keep` says what tile.z holds afterwards."""
        chunk = self.chunk
        gap = None if tile.z_ref is None else chunk.gap(tile)
        if self.zsum is not None:
            self.zsum += tile.z.sum(1)
        if self.topk is not None:
            self.topk.add(tile.z, tile.v.start)
        if self.state.s_tail is not None:
            self._add_tail(tile)
        chunk.mask(tile)
        self.flat = chunk.policy.flatness(tile.z) if self.products and chunk.policy.outer is not None else None
        peak = tile.z.amax(1)
        if gap is None:
            self._add_policy(tile, peak, keep)
            return
        assert tile.z_ref is not None
        peak_ref = tile.z_ref.amax(1)
        self._move_shift(tile, gap, peak, peak_ref)
        gap.add_(self.state.shift[:, None])
        w, grow = self._add_policy(tile, peak, keep)
        self._add_reference(tile.z_ref, peak_ref, gap, w, grow)

    def _add_tail(self, tile: Tile) -> None:
        """The sums over everything but the candidates, relative to a maximum of their own."""
        f = self.state
        z = self.chunk.scratch.take("y", tile.z).copy_(tile.z)
        self.chunk.cap_candidates(z.clamp_(min=MASK), tile.v, MASK)
        m = torch.maximum(f.m_tail, z.amax(1))
        f.s_tail = f.s_tail * torch.exp(f.m_tail - m) + exp_(z.sub_(m[:, None])).sum(1)
        f.m_tail = m

    def _move_shift(self, tile: Tile, gap: Tensor, peak: Tensor, peak_ref: Tensor) -> None:
        """Measure differences from the slice's nearest entry, where it is much nearer than those before.

        Looks only at the tokens of which both heads' maxima say that it may be: few, but in the first slice. A little
        nearer is not worth the look: an entry that hides the others' digits stands far out.
        """
        f = self.state
        assert tile.z_ref is not None
        shift, near = f.shift.clone(), f.near.clone()
        rows = (peak + peak_ref > near + NEARER).nonzero().squeeze(1)
        if rows.numel():
            rows, both = self._sums_of_logits(tile.z, tile.z_ref, rows)
            found, at = both.max(1)
            nearer = found > near[rows]
            near[rows] = torch.where(nearer, found, near[rows])
            shift[rows] = torch.where(nearer, gap[rows, at].neg_(), shift[rows])
        f.b = moved_b(f, torch.maximum(f.m, peak), shift, torch)
        step = step_to(f, shift, torch)
        f.a.add_((1 + f.rest) * step)
        if f.a_ref is not None:
            f.a_ref.addcmul_(f.s_ref, step)
        if "pD" in self.products:
            self.products["pD"].addcmul_(self.products["p"], step[:, None])
        f.near, f.shift = near, shift

    def _sums_of_logits(self, z: Tensor, z_ref: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """z + z_ref of some tokens, or where these are many of all, in one buffer, and which tokens these are."""
        buffer, n = self.chunk.scratch.take("y", z), rows.shape[0]
        if 2 * n > z.shape[0]:
            return torch.arange(z.shape[0], device=z.device), torch.add(z, z_ref, out=buffer)
        both, other = buffer[:n], buffer[n : 2 * n]
        torch.index_select(z, 0, rows, out=both)
        torch.index_select(z_ref, 0, rows, out=other)
        return rows, both.add_(other)

    def _add_policy(self, tile: Tile, peak: Tensor, keep: str | None) -> tuple[Tensor, Tensor]:
        """The sums over the policy alone; returns the weights e^(z-m) and the old weights' factor."""
        f, z, scratch = self.state, tile.z, self.chunk.scratch
        if f.above is not None and self.chunk.label is not None:
            label = self.chunk.label[0].clamp(min=MASK)[:, None]
            # As numbers: a sum of booleans converts each of them first, and takes six times as long.
            f.above += torch.gt(z, label, out=scratch.take("w", z)).sum(1).long()
        m = torch.maximum(f.m, peak)
        grow = torch.exp(f.m - m)
        x = torch.sub(z, m[:, None], out=scratch.take("x", z) if keep == "logits" else z)
        w = exp_(x) if f.t is None else torch.mul(x, LOG2E, out=scratch.take("w", z)).exp2_()
        new, newest = w.sum(1), peak > f.m
        rest = new - 1
        step, sharp = f.m - m, None
        if f.t is not None:
            _sharpen(rest, w, newest)
            sharp = x.mul_(w).sum(1)
            f.t.add_((1 + f.rest) * step).mul_(grow).add_(sharp)
            if "plogp" in self.products:
                self.products["plogp"].addcmul_(self.products["p"], step[:, None])
                self.multiply("plogp", x, grow)
        self.multiply("p", w, grow)
        if f.r is not None:
            squares = torch.mul(w, w, out=scratch.take("y", z))
            f.r.mul_(grow * grow).add_(squares.sum(1))
            self.multiply("p2", squares, grow * grow)
        f.rest = torch.where(newest, rest + (1 + f.rest) * grow, f.rest + new)
        f.m = m
        if self.chunk.slice_masses is not None:
            self.chunk.slice_masses.append(SliceMass(m, new, sharp))
        if keep == "weights":
            tile.m = m
        return w, grow

    def _add_reference(self, z_ref: Tensor, peak: Tensor, gap: Tensor, w: Tensor, grow: Tensor) -> None:
        """The sums of KL: Σw·e, Σw·expm1(-e), and the reference's own log-sum-exp; consumes `gap`."""
        f, infinite = self.state, self.chunk.may_be_infinite
        y = self.chunk.scratch.take("y", gap)

        def times_gap(weights: Tensor) -> Tensor:
            torch.mul(weights, gap, out=y)
            return y.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf) if infinite else y

        f.a = times(grow, f.a, torch).sub_(times_gap(w).sum(1))
        if "pD" in self.products:
            self.multiply("pD", y.neg_(), grow)
        m_ref = torch.maximum(f.m_ref, peak)
        grow_ref = torch.exp(f.m_ref - m_ref)
        w_ref = exp_(torch.sub(z_ref, m_ref[:, None], out=y))
        f.s_ref.mul_(grow_ref).add_(w_ref.sum(1))
        self.multiply("q", w_ref, grow_ref)
        if f.a_ref is not None:
            f.a_ref = times(grow_ref, f.a_ref, torch).sub_(times_gap(w_ref).sum(1))
        f.b.add_(gap.expm1_().mul_(w).sum(1))  # the others moved with the maximum
        f.m_ref = m_ref

    def multiply(self, basis: str, weights: Tensor, grow: Tensor) -> None:
        """products[basis] = grow·products[basis] + weights @ W."""
        if basis not in self.products:
            return
        if self.flat is not None:
            weights = weights * self.flat
        total = self.products[basis].mul_(grow[:, None])
        if basis == "pD" and self.chunk.may_be_infinite:  # 0·inf = 0
            total.masked_fill_((grow == 0)[:, None], 0.0)
        for w, part in zip(self.w, total.split(self.widths, 1), strict=True):
            add_product(weights.to(w.dtype), w, part)


def _sharpen(rest: Tensor, w: Tensor, newest: Tensor) -> None:
    """Σw - 1 with the maximum's own 1 left out of the sum, where it would swallow the digits."""
    rows = (newest & (rest < 1 / 64)).nonzero().squeeze(1)
    if rows.numel():
        part = w[rows]
        rest[rows] = part.masked_fill_(part == 1, 0.0).sum(1)


class EagerBackend(Backend):
    """Plain torch operations, on any device.

    On a CPU a slice's logits stay in cache while a few in-place operations read them.
    """

    def accumulate_local(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Partial:
        run = _Running(chunk, bases)
        for i, v in enumerate(chunk.vocabulary()):
            run.w = chunk.policy.operand(v)
            tile = chunk.logits(v, run.w, str(i) if keep else "")
            run.add(tile, keep)
            if keep:
                chunk.materialised.append(tile)
        topk = None if run.topk is None else run.topk.flush()
        return Partial(run.state, partial(normalised, run.products, run.state), run.zsum, topk)

    def mixture_sums(self, chunk: Chunk, totals: Totals) -> tuple[Tensor, Tensor]:
        jsd = torch.zeros_like(totals.m)
        kl_mixture = jsd.clone()
        for tile in chunk.materialised:
            assert tile.z_ref is not None
            d = totals.log_ratio[:, None] - chunk.gap(tile).add_(totals.shift[:, None])
            p = exp_((tile.z - totals.m[:, None]).sub_(totals.log_s[:, None]))
            q = exp_((tile.z_ref - totals.m_ref[:, None]).sub_(totals.log_s_ref[:, None]))
            share, first = mixture_shares(p, q, d, chunk.jsd_beta, torch)
            jsd += share.sum(1)
            kl_mixture += first.sum(1)
        return jsd, kl_mixture

    def logits_grad(self, chunk: Chunk, totals: Totals, coefficients: Coefficients, grads: Gradients) -> None:
        if not is_dense(chunk, coefficients):
            return
        grads.clear()
        chained = {basis: chunk.policy.chain(c) for basis, c in coefficients.items()}
        if chunk.skip is not None:
            logits_grad_of_some(chunk, totals, chained, grads, _add_slice)
            return
        for i, v in enumerate(chunk.vocabulary()):
            tile = chunk.materialised[i] if chunk.materialised else None
            _add_slice(chunk, v, tile, totals, chained, grads)


def _add_slice(
    chunk: Chunk, v: slice, tile: Tile | None, totals: Totals, coefficients: Coefficients, grads: Gradients
) -> None:
    """One slice's share of the gradients: of a tile that stayed, or recomputed."""
    w = chunk.policy.operand(v)
    if tile is None:
        tile = chunk.logits(v, w)
        chunk.mask(tile)
    dz = logits_grad_of_tile(chunk, tile, totals, coefficients)
    if grads.bias is not None:
        grads.bias[v] += dz.sum(0)
    for factor, part, (tokens, entries) in zip(chunk.policy.factors, w, grads.pairs, strict=False):
        narrow = dz.to(logits_grad_dtype(part.dtype, dz.dtype))
        if tokens is not None:
            add_product(narrow, part.to(narrow.dtype), tokens)
        if entries is not None:
            add_product(narrow.t(), factor.tokens.to(narrow.dtype), entries[v])


def logits_grad_of_tile(chunk: Chunk, tile: Tile, totals: Totals, c: Coefficients) -> Tensor:
    """dL/dz of a slice times the chain's row factor, in the slice's buffers; 0 at the label but for δ."""
    z, zero = tile.z, torch.zeros_like(totals.m)
    base = c.get("p", zero)
    if tile.m is not None:
        return z.mul_((base * torch.exp((tile.m - totals.m) - totals.log_s))[:, None])
    flat = chunk.policy.flatness(z) if chunk.policy.outer is not None else None
    terms: list[tuple[Tensor, Tensor]] = []  # what multiplies p, and its coefficient
    if "pD" in c or "pM" in c:
        gap = chunk.gap(tile).add_(totals.shift[:, None])  # D = log_ratio - gap
        if "pM" in c:
            terms.append((mixture_logs(totals.log_ratio[:, None] - gap, chunk.jsd_beta, torch)[0], c["pM"]))
        if "pD" in c:
            base = base + c["pD"] * totals.log_ratio
            terms.append((gap, -c["pD"]))
    log_p = z.sub_(totals.m[:, None]).sub_(totals.log_s[:, None])
    p = torch.mul(log_p, LOG2E, out=chunk.scratch.take("w", z)).exp2_()
    if "plogp" in c:
        terms.append((log_p, c["plogp"]))
    if "p2" in c:
        terms.append((p.clone(), c["p2"]))
    shares = None
    if "tail" in c:  # before what follows writes over log p
        shares = chunk.cap_candidates(share_of_tail(log_p, totals.tail_logprob[:, None], torch), tile.v, 0.0)
    dz = _weighted(terms, base).mul_(p) if terms else p.mul_(base[:, None])
    if "q" in c and tile.z_ref is not None:
        q = exp_(tile.z_ref.sub_(totals.m_ref[:, None]).sub_(totals.log_s_ref[:, None]))
        dz.add_(q.mul_(c["q"][:, None]))
    if shares is not None:
        dz.add_(shares.mul_(c["tail"][:, None]))
    if flat is not None:
        dz.add_(c.get("one", zero)[:, None]).mul_(flat)
    return dz


def _weighted(terms: list[tuple[Tensor, Tensor]], base: Tensor) -> Tensor:
    """base + Σ term·coefficient, in the first term's buffer; a column product is cheaper than addcmul here."""
    total, coefficient = terms[0]
    total.mul_(coefficient[:, None])
    for term, coefficient in terms[1:]:
        total.add_(term.mul_(coefficient[:, None]))
    return total.add_(base[:, None])
