"""The pass in plain torch, on any device: `fold` a chunk of tokens over the vocabulary, `unfold` its gradient.

On a CPU a slice's logits stay in cache while a few in-place operations read them; e^x is exp2 of a scaled x
because torch's vectorised exp2 costs a third of its exp.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ....algebra.fold import EMPTY, MASK, Fold, Totals
from ....algebra.stats import DENSE, Slope, label_slope, mixture_logs, mixture_shares
from ..base import Chunk, Folded, Grads, Part, Share, Tile, put_mixture
from ..logits import Operands, add_product, slope_dtype
from .skip import unfold as unfold_some
from .topk import Best

LOG2E = math.log2(math.e)


def exp_(x: Tensor) -> Tensor:
    """e^x in place."""
    return x.mul_(LOG2E).exp2_()


class _Running:
    """The running fold of a chunk, updated in place slice by slice."""

    def __init__(self, chunk: Chunk, bases: tuple[str, ...]) -> None:
        self.chunk = chunk
        z = torch.zeros(chunk.n_tokens, dtype=chunk.policy.compute, device=chunk.inputs.hidden.device)
        self.fold = Fold(m=z + EMPTY, rest=z.clone())
        self.fold.t = z.clone() if "t" in chunk.sums else None
        self.fold.r = z.clone() if "r" in chunk.sums else None
        self.fold.above = torch.zeros_like(z, dtype=torch.int64) if "above" in chunk.sums else None
        if chunk.reference is not None:
            self.fold.m_ref, self.fold.s_ref = z + EMPTY, z.clone()
            self.fold.a, self.fold.b = z.clone(), z.clone()
            self.fold.a_ref = z.clone() if "qe" in chunk.sums else None
        self.zsum = z.clone() if chunk.sums_logits else None
        self.best = Best(z, chunk.top_k) if chunk.top_k else None
        self.widths = chunk.policy.widths
        self.products = {basis: z.new_zeros(chunk.n_tokens, sum(self.widths)) for basis in bases}
        self.w: Operands = ()  # the slice of W, and of the adapters
        self.flat: Tensor | None = None  # the softcap's derivative on the slice

    def add(self, tile: Tile, keep: str | None) -> None:
        """Fold one slice in. `keep` says what tile.z holds afterwards."""
        chunk, f = self.chunk, self.fold
        gap = None
        if tile.z_ref is not None:
            if f.shift is None:
                f.shift = torch.nan_to_num((tile.z_ref - tile.z).mean(1).neg_(), 0.0, 0.0, 0.0)
            gap = chunk.gap(tile, f.shift)
        if self.zsum is not None:
            self.zsum += tile.z.sum(1)
        if self.best is not None:
            self.best.add(tile.z, tile.v.start)
        chunk.mask(tile)
        self.flat = chunk.policy.flatness(tile.z) if self.products and chunk.policy.outer is not None else None
        w, grow = self._add_policy(tile, keep)
        if gap is not None:
            self._add_reference(tile, gap, w, grow)

    def _add_policy(self, tile: Tile, keep: str | None) -> tuple[Tensor, Tensor]:
        """The sums over the policy alone; returns the weights e^(z-m) and the old weights' factor."""
        f, z, scratch = self.fold, tile.z, self.chunk.scratch
        if f.above is not None and self.chunk.label is not None:
            label = self.chunk.label[0].clamp(min=MASK)[:, None]
            # As numbers: a sum of booleans converts each of them first, and takes six times as long.
            f.above += torch.gt(z, label, out=scratch.take("w", z)).sum(1).long()
        peak = z.amax(1)
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
        if self.chunk.shares is not None:
            self.chunk.shares.append(Share(m, new, sharp))
        if keep == "weights":
            tile.m = m
        return w, grow

    def _add_reference(self, tile: Tile, gap: Tensor, w: Tensor, grow: Tensor) -> None:
        """The sums of KL: Σw·e, Σw·expm1(-e), and the reference's own log-sum-exp; consumes `gap`."""
        f, z_ref, infinite = self.fold, tile.z_ref, self.chunk.may_be_infinite
        assert z_ref is not None
        y = self.chunk.scratch.take("y", gap)

        def times_gap(weights: Tensor) -> Tensor:
            torch.mul(weights, gap, out=y)
            return y.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf) if infinite else y

        f.a.mul_(grow).sub_(times_gap(w).sum(1))
        if "pD" in self.products:
            self.multiply("pD", y.neg_(), grow)
        m_ref = torch.maximum(f.m_ref, z_ref.amax(1))
        grow_ref = torch.exp(f.m_ref - m_ref)
        w_ref = exp_(torch.sub(z_ref, m_ref[:, None], out=y))
        f.s_ref.mul_(grow_ref).add_(w_ref.sum(1))
        self.multiply("q", w_ref, grow_ref)
        if f.a_ref is not None:
            f.a_ref.mul_(grow_ref).sub_(times_gap(w_ref).sum(1))
        f.b.mul_(grow).add_(gap.expm1_().mul_(w).sum(1))
        f.m_ref = m_ref

    def multiply(self, basis: str, weights: Tensor, grow: Tensor) -> None:
        """products[basis] = grow·products[basis] + weights @ W."""
        if basis not in self.products:
            return
        if self.flat is not None:
            weights = weights * self.flat
        total = self.products[basis].mul_(grow[:, None])
        for w, part in zip(self.w, total.split(self.widths, 1), strict=True):
            add_product(weights.to(w.dtype), w, part)


def fold(chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Folded:
    """One pass over the vocabulary; with `keep` ("logits" or "weights") whole rows stay in `chunk.kept`."""
    return part(chunk, bases, keep).folded(chunk)


def part(chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Part:
    """`fold` of the rows here, unfinished: what ranks that share a vocabulary merge."""
    run = _Running(chunk, bases)
    for i, v in enumerate(chunk.vocabulary()):
        run.w = chunk.policy.operand(v)
        tile = chunk.logits(v, run.w, str(i) if keep else "")
        run.add(tile, keep)
        if keep:
            chunk.kept.append(tile)
    best = None if run.best is None else run.best.settle()
    return Part(run.fold, partial(normalised, run.products, run.fold), run.zsum, best)


def normalised(products: dict[str, Tensor], fold: Fold, totals: Totals) -> dict[str, Tensor]:
    """The products with probabilities in the weights' place, whichever rows the totals are of."""
    offset = (fold.m - totals.m) - totals.log_s  # log p = (z - fold.m) + offset
    factor = torch.exp(offset)[:, None]
    out = dict(products)
    if "plogp" in out:
        out["plogp"].addcmul_(out["p"], offset[:, None]).mul_(factor)
    if "pD" in out:
        log_ratio = totals.log_ratio + (fold.shift - totals.shift)
        out["pD"].addcmul_(out["p"], log_ratio[:, None]).mul_(factor)
    if "p2" in out:
        out["p2"].mul_(factor * factor)
    if "q" in out:
        out["q"].mul_(torch.exp((fold.m_ref - totals.m_ref) - totals.log_s_ref)[:, None])
    if "p" in out:
        out["p"].mul_(factor)
    return out


def _sharpen(rest: Tensor, w: Tensor, newest: Tensor) -> None:
    """Σw - 1 with the maximum's own 1 left out of the sum, where it would swallow the digits."""
    rows = (newest & (rest < 1 / 64)).nonzero().squeeze(1)
    if rows.numel():
        part = w[rows]
        rest[rows] = part.masked_fill_(part == 1, 0.0).sum(1)


def second_look(chunk: Chunk, totals: Totals) -> None:
    """jsd and KL(p||M) into `totals`, from the kept rows: both need the log-sum-exps first. No GEMM."""
    put_mixture(chunk, totals, *mixture_sums(chunk, totals))


def mixture_sums(chunk: Chunk, totals: Totals) -> tuple[Tensor, Tensor]:
    """The kept rows' shares of jsd and of KL(p||M), the label's left out."""
    jsd = torch.zeros_like(totals.m)
    kl_mixture = jsd.clone()
    for tile in chunk.kept:
        assert tile.z_ref is not None
        d = totals.log_ratio[:, None] - chunk.gap(tile, totals.shift)
        p = exp_((tile.z - totals.m[:, None]).sub_(totals.log_s[:, None]))
        q = exp_((tile.z_ref - totals.m_ref[:, None]).sub_(totals.log_s_ref[:, None]))
        share, first = mixture_shares(p, q, d, chunk.jsd_beta, torch)
        jsd += share.sum(1)
        kl_mixture += first.sum(1)
    return jsd, kl_mixture


def unfold(chunk: Chunk, totals: Totals, slope: Slope, grads: Grads) -> None:
    """Add the dense bases' share of every gradient to `grads`: rows kept by `fold`, or recomputed."""
    if not any(basis in slope for basis in DENSE) and not (chunk.policy.outer is not None and "one" in slope):
        return
    grads.clear()
    slope = {basis: chunk.policy.chain(c) for basis, c in slope.items()}
    if chunk.skip is not None:
        unfold_some(chunk, totals, slope, grads, _unfold_slice)
        return
    for i, v in enumerate(chunk.vocabulary()):
        _unfold_slice(chunk, v, chunk.kept[i] if chunk.kept else None, totals, slope, grads)


def _unfold_slice(chunk: Chunk, v: slice, tile: Tile | None, totals: Totals, slope: Slope, grads: Grads) -> None:
    """One slice's share: of a tile that was kept, or recomputed."""
    w = chunk.policy.operand(v)
    if tile is None:
        tile = chunk.logits(v, w)
        chunk.mask(tile)
    dz = _slope_tile(chunk, tile, totals, slope)
    if grads.bias is not None:
        grads.bias[v] += dz.sum(0)
    for factor, part, (tokens, entries) in zip(chunk.policy.factors, w, grads.pairs, strict=False):
        narrow = dz.to(slope_dtype(part.dtype, dz.dtype))
        if tokens is not None:
            add_product(narrow, part.to(narrow.dtype), tokens)
        if entries is not None:
            add_product(narrow.t(), factor.tokens.to(narrow.dtype), entries[v])


def _slope_tile(chunk: Chunk, tile: Tile, totals: Totals, c: Slope) -> Tensor:
    """dL/dz of a slice times the chain's row factor, in the slice's buffers; 0 at the label but for δ."""
    z, zero = tile.z, torch.zeros_like(totals.m)
    base = c.get("p", zero)
    if tile.m is not None:
        return z.mul_((base * torch.exp((tile.m - totals.m) - totals.log_s))[:, None])
    flat = chunk.policy.flatness(z) if chunk.policy.outer is not None else None
    terms: list[tuple[Tensor, Tensor]] = []  # what multiplies p, and its coefficient
    if "pD" in c or "pM" in c:
        gap = chunk.gap(tile, totals.shift)  # D = log_ratio - gap
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
    dz = _weighted(terms, base).mul_(p) if terms else p.mul_(base[:, None])
    if "q" in c and tile.z_ref is not None:
        q = exp_(tile.z_ref.sub_(totals.m_ref[:, None]).sub_(totals.log_s_ref[:, None]))
        dz.add_(q.mul_(c["q"][:, None]))
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


def scale_(x: Tensor, factor: Tensor) -> None:
    """x times a scalar, in place."""
    if factor.device.type != "cpu" or factor.item() != 1:
        x.mul_(factor)


def label_coefficient(chunk: Chunk, totals: Totals, slope: Slope) -> Tensor:
    """dL/d(hW) at the label, (C,): what `unfold` leaves out."""
    total = label_slope(slope, totals, chunk.jsd_beta, torch)
    if chunk.policy.outer is not None and "one" in slope:
        total = total + slope["one"]
    return chunk.policy.chain(total, totals.label_logit)
