"""The gradient of a chunk of tokens from the slopes of its statistics, slice by slice."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from ..algebra.fold import Totals, times
from ..algebra.stats import Slope, label_slope, mixture_logs, slopes
from .chunk import Chunk, Kept, Tile
from .tiles import column, product, put


@dataclass
class Grads:
    """Gradients of weight and bias as they accumulate, in the compute dtype."""

    weight: Array  # (V, H)
    bias: Array | None  # (V,)


def unfold(
    chunk: Chunk, totals: Totals, best: Array | None, g: dict[str, Array], into: Grads, kept: Kept = None
) -> tuple[Array, Grads]:
    """(dL/dhidden, `into` with dL/dW and dL/db added) for dL/dstatistics `g`; `best`: ids of the best entries."""
    spec, hidden = chunk.spec, chunk.policy.hidden
    numbers = {name: x for name, x in g.items() if name not in ("top_k_logits", "candidate_logits")}
    slope = slopes(numbers, totals, spec.rows, spec.jsd_beta, jnp)
    hot = _one_hots(chunk, slope, best, g)
    at_label = None if chunk.label is None else label_slope(slope, totals, spec.jsd_beta, jnp)

    def step(carry, each):
        dh, dw, db = carry
        tile = chunk.tile(*each)
        dz = _slope_tile(chunk, tile, totals, slope)
        if at_label is not None and tile.at_label is not None:
            dz = jnp.where(tile.at_label, at_label[:, None], dz)
        dz = dz + column(slope["one"]) if "one" in slope else dz
        for ids, c in hot:
            dz = _add_at(dz, ids - (chunk.first + tile.start), c)
        dz = jnp.where(chunk.counts[:, None] & tile.fresh, chunk.policy.chain(dz, tile.z), 0.0)
        db = None if db is None else put(db, tile.start, dz.sum(0))
        dz = dz.astype(tile.w.dtype)
        dh = dh + product(dz, tile.w, (1, 0), dh.dtype)
        return (dh, put(dw, tile.start, product(dz, hidden, (0, 0), dw.dtype)), db), None

    start = chunk.zeros(hidden.shape[1]), into.weight, into.bias
    (dh, dw, db), _ = lax.scan(step, start, (chunk.slices(), kept))
    return dh, Grads(dw, db)


def _one_hots(chunk: Chunk, slope: Slope, best: Array | None, g: dict[str, Array]) -> list[tuple[Array, Array]]:
    """(ids, dL/dz at them), (C, K) each: the gradients that go to single entries, the label's aside."""
    out = []
    if best is not None and "argmax" in slope:
        out.append((best[:, :1], slope["argmax"][:, None]))
    if best is not None and "top_k_logits" in g:
        out.append((best[:, : chunk.spec.top_k], g["top_k_logits"]))
    if chunk.candidates is not None and "candidate_logits" in g:
        out.append((chunk.candidates, g["candidate_logits"]))
    return out


def _add_at(dz: Array, columns: Array, c: Array) -> Array:
    """dz with c added at some columns of each row, those outside of the slice dropped."""
    inside = (columns >= 0) & (columns < dz.shape[1])
    where = jnp.where(inside, columns, dz.shape[1])
    return dz.at[jnp.arange(dz.shape[0])[:, None], where].add(c, mode="drop")


def _slope_tile(chunk: Chunk, tile: Tile, totals: Totals, slope: Slope) -> Array:
    """dL/dz of a slice from the dense bases."""
    c = {basis: column(x) for basis, x in slope.items()}
    log_p = tile.log_p(totals)
    p = jnp.exp(log_p)
    inner = c.get("p", jnp.zeros_like(p)) - c.get("logprob", 0.0)
    if "plogp" in c:
        inner = inner + c["plogp"] * log_p
    if "p2" in c:
        inner = inner + c["p2"] * p
    if "pD" in c or "pM" in c:
        d = tile.log_ratio(totals)
        if "pD" in c:
            inner = inner + times(c["pD"], d, jnp)
        if "pM" in c:
            inner = inner + c["pM"] * mixture_logs(d, chunk.spec.jsd_beta, jnp)[0]
    dz = times(p, inner, jnp)
    if "q" in c:
        dz = dz + c["q"] * jnp.exp(tile.log_q(totals))
    return dz
