"""The online-softmax accumulation of a chunk of tokens over the vocabulary, slice by slice."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from ...algebra.online_softmax import (
    EMPTY,
    MASK,
    SECOND_LOOK,
    Accumulation,
    Totals,
    difference,
    empty,
    finish,
    merge,
    put_tail_label,
    times,
)
from ...algebra.stats import label_shares, put_second_look, second_look
from ..mesh import merge_devices, varying
from .chunk import Chunk, Materialised, Slice
from .topk import TopEntries, merge_slice, topk_of_devices


@dataclass
class Accumulated:
    """A chunk's totals, its top entries, and the logits of all slices where they are materialised."""

    totals: Totals
    topk: TopEntries | None = None
    slices: Materialised = None


def accumulate(chunk: Chunk, materialise: bool = False) -> Accumulated:
    """One pass over the vocabulary."""
    options, zeros = chunk.options, chunk.zeros()
    materialise = materialise or options.materialises

    def step(carry, i):
        """A slice merged into (running sums, Σz, top entries)."""
        sums, zsum, topk = Accumulation(**carry[0]), carry[1], carry[2]
        part = chunk.slice_at(i)
        sums = merge(sums, _sums_of(chunk, part), jnp)
        if zsum is not None:
            zsum = zsum + jnp.where(part.fresh, part.z, 0.0).sum(1)
        if topk is not None:
            # Above what stands for no entry, so that entries of -inf have ids of their own.
            live = jnp.where(part.fresh, jnp.maximum(part.z, MASK), -jnp.inf)
            topk = merge_slice(topk, live, part.start + chunk.vocab_start)
        return (dict(sums.items()), zsum, topk), (part.z, part.z_ref) if materialise else None

    count = varying(jnp.zeros(zeros.shape, int), chunk.axes)
    none = empty(zeros, count, options.sums, chunk.reference is not None)
    start = dict(none.items()), zeros if "zsum" in options.sums else None, _no_entries(chunk, zeros)
    (sums, zsum, topk), slices = lax.scan(step, start, chunk.slices())
    totals = finish(merge_devices(Accumulation(**sums), options.axis_name), chunk.label_logits, jnp)
    if totals.rank is not None and chunk.label_logits is not None:  # above a NaN is nothing
        totals.rank = jnp.where(jnp.isnan(chunk.label_logits[0]), 0, totals.rank)
    if zsum is not None:
        zsum = zsum if options.axis_name is None else lax.psum(zsum, options.axis_name)
        totals.mean_logit = zsum / chunk.call.vocab_size
    if topk is not None and options.axis_name is not None:
        topk = topk_of_devices(topk, options.axis_name)
    if topk is not None:
        topk = jnp.where(topk[0] <= MASK, -jnp.inf, topk[0]), topk[1]
    if options.materialises:
        _second_look(chunk, totals, slices)
    put_tail_label(totals, chunk.labels, chunk.call.tokens.candidates, jnp)
    return Accumulated(totals, topk, slices)


def _no_entries(chunk: Chunk, zeros: Array) -> TopEntries | None:
    """Top entries before the first slice, where any are wanted: logits of -inf, ids of -1."""
    k = chunk.options.topk_size
    if not k:
        return None
    shape = zeros.shape[0], k
    return varying((jnp.full(shape, -jnp.inf, zeros.dtype), jnp.full(shape, -1, jnp.int32)), chunk.axes)


def _sums_of(chunk: Chunk, part: Slice) -> Accumulation:
    """The sums of one slice without the label."""
    wanted = chunk.options.sums
    z = jnp.where(part.left_out, MASK, jnp.maximum(part.z, MASK))
    m = jnp.maximum(z.max(1), EMPTY)
    x = z - m[:, None]
    w, top = jnp.exp(x), x == 0
    # Σw - 1 as the others' sum: the maximum's own 1 would swallow their digits. How often it was left out the sums say,
    # not `top`: XLA may compute z anew for each of them, and round it apart, so that x is 0 in one and not in another.
    others = jnp.where(top, 0.0, w).sum(1)
    rest = jnp.maximum(others + (jnp.round(w.sum(1) - others) - 1), 0)
    out = Accumulation(m=m, rest=rest)
    if "t" in wanted:
        out.t = (w * x).sum(1)
    if "r" in wanted:
        out.r = (w * w).sum(1)
    if "above" in wanted and chunk.label_logits is not None:
        out.above = (z > jnp.maximum(chunk.label_logits[0], MASK)[:, None]).sum(1)
    if part.z_ref is not None:
        z_ref = jnp.where(part.left_out, MASK, jnp.maximum(part.z_ref, MASK))
        out.near, out.shift = _nearest(z, z_ref)
        e = difference(part.z, part.z_ref, out.shift[:, None], jnp)
        out.m_ref = jnp.maximum(z_ref.max(1), EMPTY)
        w_ref = jnp.exp(z_ref - out.m_ref[:, None])
        out.s_ref = w_ref.sum(1)
        out.a = times(w, e, jnp).sum(1)
        grown = w_ref * jnp.exp((out.m_ref - m) + out.shift)[:, None]  # w·e^(-e), where a factor would overflow
        out.b = jnp.where(jnp.abs(e) < 1, w * jnp.expm1(-e), grown - w).sum(1)
        out.a_ref = times(w_ref, e, jnp).sum(1) if "qe" in wanted else None
    if "tail" in wanted:
        z = jnp.where(chunk.in_tail(part), jnp.maximum(part.z, MASK), MASK)
        out.m_tail = jnp.maximum(z.max(1), EMPTY)
        out.s_tail = jnp.exp(z - out.m_tail[:, None]).sum(1)
    return out


def _nearest(z: Array, z_ref: Array) -> tuple[Array, Array]:
    """(near, shift) of a slice: max (z + z_ref), and z - z_ref of that entry; of none where each masks all."""
    both = z + z_ref
    near = jnp.maximum(both.max(1), EMPTY)
    # the first such entry's, by a maximum: a gather of one column would keep XLA from fusing the slice's sums
    own = jnp.where(both == near[:, None], z - z_ref, -jnp.inf).max(1)
    return near, jnp.where(near > EMPTY, own, jnp.zeros_like(near))


def _second_look(chunk: Chunk, totals: Totals, slices: Materialised) -> None:
    """What needs both log-sum-exps first into `totals`. No GEMM."""
    options = chunk.options
    wanted, beta = options.sums, options.jsd_beta

    def step(sums, each):
        """A slice's shares added to the sums."""
        part = chunk.slice_at(*each)
        p, q = jnp.exp(part.log_p(totals)), jnp.exp(part.log_q(totals))
        shares = second_look(wanted, p, q, part.log_ratio(totals), beta, jnp)
        return {name: x + jnp.where(part.left_out, 0.0, shares[name]).sum(1) for name, x in sums.items()}, None

    start = {name: chunk.zeros() for name in SECOND_LOOK if name in wanted}
    sums, _ = lax.scan(step, start, (chunk.slices(), slices))
    if options.axis_name is not None:
        sums = lax.psum(sums, options.axis_name)
    label = None if chunk.label_logits is None else label_shares(totals, wanted, beta, jnp)
    put_second_look(totals, sums, label, beta, jnp)
