"""A whole call, chunk by chunk of its tokens: values, gradients, and a loss with its gradients at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..algebra.fold import Totals
from ..algebra.stats import STATISTICS
from ..errors import GradientError
from .chunk import Chunk, entry
from .fold import Folded, fold
from .mesh import settle, varies, varying
from .problem import Operands, Spec, Tokens, slices_for
from .tiles import compute_dtype, take, window, windows
from .unfold import Grads, unfold

SPARSE = ("top_k_logits", "candidate_logits")
Stats = dict[str, Array]
Recipe = Callable[[Stats], Array]  # statistics of some tokens -> one loss each


@partial(jax.jit, static_argnums=(0, 1))
def values(spec: Spec, save: bool, x: Operands) -> tuple[Stats, Any]:
    """The wanted statistics of all tokens (0 where ignored, ids -1), and what `gradients` needs, O(N)."""
    slices = slices_for(spec, x, spec.whole)

    def step(carry, fresh, tokens):
        chunk = Chunk.of(spec, x._replace(tokens=tokens), slices.width, fresh)
        folded = fold(chunk)
        return carry, (read(chunk, folded), _saved(folded) if save else None)

    return by_chunks(step, slices.tokens, None, x.tokens)[1]


@partial(jax.jit, static_argnums=0)
def gradients(spec: Spec, x: Operands, saved: Any, g: Stats) -> Operands:
    """The gradient of every operand for upstream gradients of the statistics: slices are computed anew."""
    slices = slices_for(spec, x, spec.whole)

    def step(into, fresh, each):
        tokens, (totals, best), g = each
        chunk = Chunk.of(spec, x._replace(tokens=tokens), slices.width, fresh)
        masked = {name: _where(chunk.counts, up, 0) for name, up in g.items()}
        dh, into = unfold(chunk, Totals(**totals), best, masked, Grads(*into))
        return (into.weight, into.bias), _narrow(dh, x)

    (dw, db), dh = by_chunks(step, slices.tokens, _no_gradient(x), (x.tokens, saved, g))
    return cotangents(x, dh, dw, db, jnp.ones((), dw.dtype))


@partial(jax.jit, static_argnums=(0, 1))
def formed(spec: Spec, recipe: Recipe, x: Operands, scale: Array) -> tuple[Array, tuple[Array, Array, Array | None]]:
    """The loss of each token, (N,), and (dhidden, dweight, dbias) of scale·Σ loss: 3 GEMMs in all."""
    slices = slices_for(spec, x, whole=True)

    def step(into, fresh, tokens):
        chunk = Chunk.of(spec, x._replace(tokens=tokens), slices.width, fresh)
        folded = fold(chunk, keep=True)
        loss, pull = jax.vjp(recipe, read(chunk, folded))
        (g,) = pull(jnp.where(chunk.counts, scale, 0.0).astype(loss.dtype))
        best = None if folded.best is None else folded.best[1]
        dh, into = unfold(chunk, folded.totals, best, g, Grads(*into), folded.kept)
        return (into.weight, into.bias), (_where(chunk.counts, loss, 0), _narrow(dh, x))

    (dw, db), (loss, dh) = by_chunks(step, slices.tokens, _no_gradient(x), x.tokens)
    return loss, (dh, dw, db)


def cotangents(x: Operands, dh: Array, dw: Array, db: Array | None, factor: Array) -> Operands:
    """The gradients times `factor` as the operands' own; labels, temperature and the reference have none."""

    def finished(gradient: Array, primal: Array) -> Array:  # each alone: one that nobody asks for is not computed
        return _once(settle(gradient.astype(factor.dtype) * factor, primal))

    bias = None if db is None or x.bias is None else finished(db, x.bias)
    return Operands(Tokens(finished(dh, x.tokens.hidden)), finished(dw, x.weight), bias)


@jax.custom_jvp
def _once(gradient: Array) -> Array:
    """`gradient`, which cannot be differentiated again: that would keep the logits of all slices."""
    return gradient


@_once.defjvp
def _twice(primals: Any, tangents: Any) -> Any:
    raise GradientError(
        "logitless.jax: expected one derivative, got a second one, which is not defined; use dense logits for it"
    )


def read(chunk: Chunk, folded: Folded) -> Stats:
    """The wanted statistics of a folded chunk."""
    spec, counts = chunk.spec, chunk.counts
    out = {name: _where(counts, STATISTICS[name].value(folded.totals, spec.rows), 0) for name in spec.want}
    if spec.top_k and folded.best is not None:
        logits, ids = (x[:, : spec.top_k] for x in folded.best)
        out |= {"top_k_ids": _where(counts, ids, -1), "top_k_logits": _where(counts, logits, 0)}
    if chunk.candidates is not None:

        def at(ids: Array) -> Array:
            return entry(spec, chunk.policy, ids, chunk.rows, chunk.first)

        out["candidate_logits"] = _where(counts, lax.map(at, chunk.candidates.T).T, 0)
    return out


def _saved(folded: Folded) -> Any:
    return dict(folded.totals.items()), None if folded.best is None else folded.best[1]


def _where(counts: Array, x: Array, other: float) -> Array:
    return jnp.where(counts if x.ndim == 1 else counts[:, None], x, jnp.full_like(x, other))


def _no_gradient(x: Operands) -> tuple[Array, Array | None]:
    compute, axes = compute_dtype(x.tokens.hidden), varies(x)
    parts = (None if y is None else jnp.zeros(y.shape, compute) for y in (x.weight, x.bias))
    return tuple(varying(y, axes) for y in parts)  # pyright: ignore[reportReturnType]


def _narrow(dh: Array, x: Operands) -> Array:
    """dL/dhidden in the dtype it is kept in: fp16 would underflow before a loss scale arrives."""
    dtype = x.tokens.hidden.dtype
    shared = varies(dh) != varies(x.tokens.hidden)  # to be summed over devices first
    return dh if shared or dtype == jnp.float16 else dh.astype(dtype)


def by_chunks(step: Callable[..., Any], size: int, carry: Any, tokens: Any) -> tuple[Any, Any]:
    """(carry, outputs of all tokens) of carry, outputs = step(carry, fresh, some tokens) over all chunks."""
    n = jax.tree.leaves(tokens)[0].shape[0]

    def body(carry, i):
        place = window(i, size, n)
        return step(carry, place.fresh, jax.tree.map(lambda x: take(x, place.start, size), tokens))

    def joined(y: Array) -> Array:
        again = y.shape[0] * size - n  # tokens of the last chunk that the one before had
        if not again:
            return y.reshape(n, *y.shape[2:])
        return jnp.concatenate([y[:-1].reshape(-1, *y.shape[2:]), y[-1, again:]])

    carry, out = lax.scan(body, carry, jnp.arange(windows(size, n), dtype=jnp.int32))
    return carry, jax.tree.map(joined, out)
