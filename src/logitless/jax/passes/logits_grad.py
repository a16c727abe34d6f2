"""The logits' gradient of a chunk of tokens, slice by slice, and the gradients of its hidden states and the head."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from ...algebra.online_softmax import Totals, share_of_tail, times
from ...algebra.stats import STATISTICS, Coefficients, coefficients_of, excess, label_coefficient, mixture_logs, sides
from .chunk import Chunk, Materialised, Slice
from .projection import column, logits_grad_dtype, product
from .windows import put


@dataclass
class HeadGrads:
    """Gradients of weight and bias as they accumulate, in the compute dtype."""

    weight: Array  # (V, H)
    bias: Array | None  # (V,)


def backward(
    chunk: Chunk,
    totals: Totals,
    topk_ids: Array | None,
    g: dict[str, Array],
    into: HeadGrads,
    slices: Materialised = None,
) -> tuple[Array, HeadGrads]:
    """(dL/dhidden, `into` with dL/dW and dL/db added) for dL/dstatistics `g`; `slices`: logits, if materialised."""
    options, policy = chunk.options, chunk.policy
    rounded = logits_grad_dtype(policy.hidden.dtype, policy.compute)
    hidden = policy.hidden.astype(rounded)
    numbers = {name: x for name, x in g.items() if name in STATISTICS}
    coefficients = coefficients_of(numbers, totals, chunk.call.vocab_size, options.jsd_beta, jnp)
    one_hots = _one_hots(chunk, coefficients, topk_ids, g)
    at_label = None if chunk.label_logits is None else label_coefficient(coefficients, totals, options.jsd_beta, jnp)

    def step(carry, each):
        """A slice's share of (dL/dhidden, dL/dW, dL/db) added."""
        dh, dw, db = carry
        part = chunk.slice_at(*each)
        dz = _dense_logits_grad(chunk, part, totals, coefficients)
        if at_label is not None and part.at_label is not None:
            dz = jnp.where(part.at_label, at_label[:, None], dz)
        dz = dz + column(coefficients["one"]) if "one" in coefficients else dz
        for ids, c in one_hots:
            dz = _add_at(dz, ids - (chunk.vocab_start + part.start), c)
        dz = jnp.where(chunk.valid[:, None] & part.fresh, policy.chain(dz, part.z), 0.0)
        db = None if db is None else put(db, part.start, dz.sum(0))
        dz = dz.astype(rounded)
        dh = dh + product(dz, part.weight.astype(rounded), (1, 0), dh.dtype)
        return (dh, put(dw, part.start, product(dz, hidden, (0, 0), dw.dtype)), db), None

    start = chunk.zeros(hidden.shape[1]), into.weight, into.bias
    (dh, dw, db), _ = lax.scan(step, start, (chunk.slices(), slices))
    return dh, HeadGrads(dw, db)


def _one_hots(
    chunk: Chunk, coefficients: Coefficients, topk_ids: Array | None, g: dict[str, Array]
) -> list[tuple[Array, Array]]:
    """(ids, dL/dz at them), (C, K) each: the gradients that go to single entries, the label's aside."""
    candidates = chunk.call.tokens.candidates
    out = []
    if topk_ids is not None and "argmax" in coefficients:
        out.append((topk_ids[:, :1], coefficients["argmax"][:, None]))
    if topk_ids is not None and "top_k_logits" in g:
        out.append((topk_ids[:, : chunk.options.top_k], g["top_k_logits"]))
    if candidates is not None and "candidate_logits" in g:
        out.append((candidates, g["candidate_logits"]))
    return out


def _add_at(dz: Array, columns: Array, c: Array) -> Array:
    """dz with c added at some columns of each row, those outside of the slice dropped."""
    inside = (columns >= 0) & (columns < dz.shape[1])
    where = jnp.where(inside, columns, dz.shape[1])
    return dz.at[jnp.arange(dz.shape[0])[:, None], where].add(c, mode="drop")


def _dense_logits_grad(chunk: Chunk, part: Slice, totals: Totals, coefficients: Coefficients) -> Array:
    """dL/dz of a slice from the bases that have a number for every entry."""
    c = {basis: column(x) for basis, x in coefficients.items()}
    log_p = part.log_p(totals)
    p = jnp.exp(log_p)
    inner = c.get("p", jnp.zeros_like(p)) - c.get("logprob", 0.0)
    if "plogp" in c:
        inner = inner + c["plogp"] * log_p
    if "p2" in c:
        inner = inner + c["p2"] * p
    if {"pD", "pM", "excess", "ahead"} & c.keys():
        d = part.log_ratio(totals)
        if "pD" in c:
            inner = inner + times(c["pD"], d, jnp)
        if "pM" in c:
            inner = inner + c["pM"] * mixture_logs(d, chunk.options.jsd_beta, jnp)[0]
        if "excess" in c:
            inner = inner + c["excess"] * excess(d, chunk.options.jsd_beta, jnp)
        if "ahead" in c:
            first, second = sides(d, jnp)
            inner = inner + c["ahead"] * first + c["behind"] * second
    dz = times(p, inner, jnp)
    if "q" in c:
        dz = dz + c["q"] * jnp.exp(part.log_q(totals))
    if "tail" in c:
        shares = share_of_tail(log_p, column(totals.tail_logprob), jnp)
        dz = dz + c["tail"] * jnp.where(chunk.in_tail(part), shares, 0.0)
    return dz
