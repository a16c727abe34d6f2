"""A whole call, chunk by chunk of its tokens: values, gradients, and a loss with its gradients at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...algebra.online_softmax import Totals
from ...algebra.stats import STATISTICS
from ...errors import GradientError
from ..call import Call, Tokens
from ..mesh import summed_like, varies, varying
from .accumulate import Accumulated, accumulate
from .chunk import Chunk, logits_at
from .logits_grad import HeadGrads, backward
from .slices import slices_for
from .windows import take, window, windows

Stats = dict[str, Array]
TokenLoss = Callable[[Stats], Array]  # statistics of some tokens -> one loss each


@partial(jax.jit, static_argnames="save")
def values(call: Call, *, save: bool) -> tuple[Stats, Any]:
    """The wanted statistics of all tokens (0 where ignored, ids -1), and what `gradients` needs, O(N), to `save`."""
    slices = slices_for(call, materialise=call.options.materialises)

    def step(carry, fresh, tokens):
        """The statistics of a chunk."""
        chunk = Chunk.of(replace(call, tokens=tokens), slices.width, fresh)
        found = accumulate(chunk)
        return carry, (statistics_of(chunk, found), _saved(found) if save else None)

    return by_chunks(step, slices.tokens, None, call.tokens)[1]


@jax.jit
def gradients(call: Call, saved: Any, g: Stats) -> Call:
    """The gradient of every operand for upstream gradients of the statistics: slices are computed anew."""
    slices = slices_for(call, materialise=call.options.materialises, gradient=True)

    def step(into, fresh, each):
        """A chunk's gradients: the hidden states' returned, the head's added."""
        tokens, (totals, topk_ids), g = each
        chunk = Chunk.of(replace(call, tokens=tokens), slices.width, fresh)
        masked = {name: _where_valid(chunk, upstream, 0) for name, upstream in g.items()}
        dh, into = backward(chunk, Totals(**totals), topk_ids, masked, HeadGrads(*into))
        return (into.weight, into.bias), _narrow(dh, call)

    (dw, db), dh = by_chunks(step, slices.tokens, _zero_gradients(call), (call.tokens, saved, g))
    return cotangents(call, dh, dw, db, jnp.ones((), dw.dtype))


@partial(jax.jit, static_argnums=0)
def loss_and_gradients(
    token_loss: TokenLoss, call: Call, scale: Array
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    """The loss of each token, (N,), and (dhidden, dweight, dbias) of scale·Σ loss: 3 GEMMs in all."""
    slices = slices_for(call, materialise=True, gradient=True)

    def step(into, fresh, tokens):
        """A chunk's loss and gradients, of the logits that are still there."""
        chunk = Chunk.of(replace(call, tokens=tokens), slices.width, fresh)
        found = accumulate(chunk, materialise=True)
        loss, pull = jax.vjp(token_loss, statistics_of(chunk, found))
        (g,) = pull(jnp.where(chunk.valid, scale, 0.0).astype(loss.dtype))
        topk_ids = None if found.topk is None else found.topk[1]
        dh, into = backward(chunk, found.totals, topk_ids, g, HeadGrads(*into), found.slices)
        return (into.weight, into.bias), (_where_valid(chunk, loss, 0), _narrow(dh, call))

    (dw, db), (loss, dh) = by_chunks(step, slices.tokens, _zero_gradients(call), call.tokens)
    return loss, (dh, dw, db)


def cotangents(call: Call, dh: Array, dw: Array, db: Array | None, factor: Array) -> Call:
    """The gradients times `factor` as the operands' own; labels, temperature and the reference have none."""

    def finished(gradient: Array, primal: Array) -> Array:  # each alone: one that nobody asks for is not computed
        return differentiable_once(summed_like(gradient.astype(factor.dtype) * factor, primal))

    head = call.head
    bias = None if db is None or head.bias is None else finished(db, head.bias)
    head = replace(head, weight=finished(dw, head.weight), bias=bias)
    return Call(call.options, call.vocab_size, Tokens(finished(dh, call.tokens.hidden)), head)


@jax.custom_jvp
def differentiable_once(gradient: Array) -> Array:
    """What is or makes a gradient, and cannot be differentiated again: that would keep the logits of all slices."""
    return gradient


@differentiable_once.defjvp
def _second_derivative(primals: Any, tangents: Any) -> Any:
    raise GradientError(
        "logitless.jax: expected one derivative, got a second one, which is not defined; use dense logits for it"
    )


def in_reverse(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) of a custom_vjp function, which has no forward mode.

    Raises GradientError for `jax.jvp`; JAX itself raises inside jit, where a gradient begins in the same way.
    """
    try:
        return function(*args)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise GradientError(
            "logitless.jax: expected reverse mode, got forward mode (jax.jvp, jax.jacfwd), which is not supported; use "
            "jax.vjp, jax.grad or jax.jacrev"
        ) from error


def statistics_of(chunk: Chunk, found: Accumulated) -> Stats:
    """The wanted statistics of a chunk."""
    call, options = chunk.call, chunk.options
    out = {name: _where_valid(chunk, STATISTICS[name].value(found.totals, call.vocab_size), 0) for name in options.want}
    if options.top_k and found.topk is not None:
        logits, ids = (x[:, : options.top_k] for x in found.topk)
        out |= {"top_k_ids": _where_valid(chunk, ids, -1), "top_k_logits": _where_valid(chunk, logits, 0)}
    if call.tokens.candidates is not None:
        at_candidates = lax.map(partial(logits_at, call, chunk.policy), call.tokens.candidates.T).T
        out["candidate_logits"] = _where_valid(chunk, at_candidates, 0)
    return out


def _saved(found: Accumulated) -> Any:
    return dict(found.totals.items()), None if found.topk is None else found.topk[1]


def _where_valid(chunk: Chunk, x: Array, other: float) -> Array:
    """x (C,) or (C, K), with `other` for tokens that are not valid."""
    valid = chunk.valid if x.ndim == 1 else chunk.valid[:, None]
    return jnp.where(valid, x, jnp.full_like(x, other))


def _zero_gradients(call: Call) -> tuple[Array, Array | None]:
    """The head's gradients before the first chunk."""
    parts = (call.head.weight, call.head.bias)
    zeros = (None if x is None else jnp.zeros(x.shape, call.compute_dtype) for x in parts)
    return tuple(varying(x, varies(call)) for x in zeros)  # pyright: ignore[reportReturnType]


def _narrow(dh: Array, call: Call) -> Array:
    """dL/dhidden in the dtype it is stored in: fp16 would underflow before a loss scale arrives."""
    hidden = call.tokens.hidden
    shared = varies(dh) != varies(hidden)  # to be summed over devices first
    return dh if shared or hidden.dtype == jnp.float16 else dh.astype(hidden.dtype)


def by_chunks(step: Callable[..., Any], size: int, carry: Any, tokens: Any) -> tuple[Any, Any]:
    """(carry, outputs of all tokens) of carry, outputs = step(carry, fresh, some tokens) over all chunks."""
    n = jax.tree.leaves(tokens)[0].shape[0]

    def body(carry, i):
        """One chunk."""
        place = window(i, size, n)
        return step(carry, place.fresh, jax.tree.map(lambda x: take(x, place.start, size), tokens))

    def joined(y: Array) -> Array:
        """Outputs of all chunks, (chunks, size, ...) -> (n, ...)."""
        again = y.shape[0] * size - n  # tokens of the last chunk that the one before had
        if not again:
            return y.reshape(n, *y.shape[2:])
        return jnp.concatenate([y[:-1].reshape((y.shape[0] - 1) * size, *y.shape[2:]), y[-1, again:]])

    carry, out = lax.scan(body, carry, jnp.arange(windows(size, n), dtype=jnp.int32))
    return carry, jax.tree.map(joined, out)
