"""The fold of a chunk of tokens over the vocabulary, slice by slice."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from ..algebra.fold import EMPTY, MASK, Fold, Totals, difference, finish, merge, times
from ..algebra.stats import mixture_shares
from .chunk import Chunk, Kept, Tile
from .mesh import merged, varying
from .topk import best_of_all, better


@dataclass
class Folded:
    """A chunk after its fold: totals, the best entries' (logits, ids), the logits of all slices where kept."""

    totals: Totals
    best: tuple[Array, Array] | None = None
    kept: Kept = None


def fold(chunk: Chunk, keep: bool = False) -> Folded:
    """One pass over the vocabulary."""
    spec, like = chunk.spec, chunk.zeros()
    keep = keep or spec.whole

    def step(carry, i):
        run, zsum, best = Fold(**carry[0]), carry[1], carry[2]
        tile = chunk.tile(i)
        if tile.z_ref is not None:
            middle = jnp.nan_to_num((tile.z - tile.z_ref).mean(1), nan=0.0, posinf=0.0, neginf=0.0)
            run.shift = jnp.where(i == 0, middle, run.shift)
        run = merge(run, _part(chunk, tile, run.shift), jnp)
        if zsum is not None:
            zsum = zsum + jnp.where(tile.fresh, tile.z, 0.0).sum(1)
        if best is not None:
            # above what stands for no entry, so that entries of -inf have ids of their own
            live = jnp.where(tile.fresh, jnp.maximum(tile.z, MASK), -jnp.inf)
            best = better(best, live, tile.start + chunk.first)
        return (dict(run.items()), zsum, best), (tile.z, tile.z_ref) if keep else None

    zsum = like if "zsum" in spec.sums else None
    best = None
    if spec.best:
        nothing = jnp.full((like.shape[0], spec.best), -1, jnp.int32)
        best = varying((jnp.full(nothing.shape, -jnp.inf, like.dtype), nothing), chunk.axes)
    start = dict(_empty(chunk, like).items()), zsum, best
    (run, zsum, best), kept = lax.scan(step, start, chunk.slices())
    totals = finish(merged(Fold(**run), spec.axis), chunk.label, jnp)
    if zsum is not None:
        totals.mean_logit = (zsum if spec.axis is None else lax.psum(zsum, spec.axis)) / spec.rows
    if best is not None and spec.axis is not None:
        best = best_of_all(best, spec.axis)
    if best is not None:
        best = jnp.where(best[0] <= MASK, -jnp.inf, best[0]), best[1]
    if spec.whole:
        _second_look(chunk, totals, kept)
    return Folded(totals, best, kept if keep else None)


def _empty(chunk: Chunk, like: Array) -> Fold:
    sums, low = chunk.spec.sums, like + EMPTY
    out = Fold(m=low, rest=like, t=like if "t" in sums else None, r=like if "r" in sums else None)
    if "above" in sums:
        out.above = varying(jnp.zeros(like.shape, int), chunk.axes)
    if chunk.reference is not None:
        out.m_ref, out.s_ref, out.shift, out.a, out.b = low, like, like, like, like
        out.a_ref = like if "qe" in sums else None
    return out


def _part(chunk: Chunk, tile: Tile, shift: Array | None) -> Fold:
    """The fold of one slice without the label."""
    sums = chunk.spec.sums
    z = jnp.where(tile.out, MASK, jnp.maximum(tile.z, MASK))
    m = jnp.maximum(z.max(1), EMPTY)
    x = z - m[:, None]
    w, top = jnp.exp(x), x == 0
    # Σw - 1 as the others' sum: the maximum's own 1 would swallow their digits
    rest = jnp.where(top, 0.0, w).sum(1) + jnp.maximum(top.sum(1) - 1, 0)
    part = Fold(m=m, rest=rest)
    if "t" in sums:
        part.t = (w * x).sum(1)
    if "r" in sums:
        part.r = (w * w).sum(1)
    if "above" in sums and chunk.label is not None:
        part.above = (z > jnp.maximum(chunk.label[0], MASK)[:, None]).sum(1)
    if tile.z_ref is not None and shift is not None:
        e = difference(tile.z, tile.z_ref, shift[:, None], jnp)
        z_ref = jnp.where(tile.out, MASK, jnp.maximum(tile.z_ref, MASK))
        part.m_ref = jnp.maximum(z_ref.max(1), EMPTY)
        w_ref = jnp.exp(z_ref - part.m_ref[:, None])
        part.s_ref, part.shift = w_ref.sum(1), shift
        part.a = times(w, e, jnp).sum(1)
        part.b = times(w, jnp.expm1(-e), jnp).sum(1)
        part.a_ref = times(w_ref, e, jnp).sum(1) if "qe" in sums else None
    return part


def _second_look(chunk: Chunk, totals: Totals, kept: Kept) -> None:
    """jsd and KL(p||M) into `totals`: both need the log-sum-exps first. No GEMM."""
    beta = chunk.spec.jsd_beta

    def step(sums, each):
        tile = chunk.tile(*each)
        p, q = jnp.exp(tile.log_p(totals)), jnp.exp(tile.log_q(totals))
        shares = mixture_shares(p, q, tile.log_ratio(totals), beta, jnp)
        return tuple(x + jnp.where(tile.out, 0.0, y).sum(1) for x, y in zip(sums, shares, strict=True)), None

    (jsd, kl_mixture), _ = lax.scan(step, (chunk.zeros(), chunk.zeros()), (chunk.slices(), kept))
    if chunk.spec.axis is not None:
        jsd, kl_mixture = lax.psum((jsd, kl_mixture), chunk.spec.axis)
    if chunk.label is not None:
        e = difference(*chunk.label, totals.shift, jnp)
        p, q = jnp.exp(totals.logprob), jnp.exp((totals.label_ref - totals.m_ref) - totals.log_s_ref)
        at_label = mixture_shares(p, q, e + totals.log_ratio, beta, jnp)
        jsd, kl_mixture = jsd + at_label[0], kl_mixture + at_label[1]
    totals.jsd, totals.kl_mixture = jnp.maximum(jsd, 0.0), kl_mixture
