"""`token_stats` and `linear_topk`: per-token numbers of a head's distribution, for any upstream gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..algebra.options import whole_within
from ..algebra.stats import has_gradient
from .call import Call, Options
from .head import LMHead
from .passes.engine import Stats, differentiable_once, gradients, in_reverse, values
from .validate import checked_call


@jax.tree_util.register_pytree_with_keys_class
class TokenStats:
    """Per-token statistics of a head's distribution, as attributes; only those that were asked for exist.

    Floating ones are fp32 (fp64 for fp64 inputs) of the labels' shape (...); `rank` and `top_k_ids` integer;
    `top_k_ids`, `top_k_logits` (..., k), highest first; `candidate_logits` (..., K). In nats. A pytree.
    Ignored tokens hold 0 (`top_k_ids` -1). Raises AttributeError for a statistic that was not asked for.
    """

    def __init__(self, values: Stats) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Array:
        computed = ", ".join(vars(self))
        raise AttributeError(f"TokenStats: {name} is not among {computed}; ask for it by want, top_k or candidates")

    def __repr__(self) -> str:
        return f"TokenStats({', '.join(f'{name}={x}' for name, x in vars(self).items())})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(jax.tree_util.GetAttrKey(name), x) for name, x in vars(self).items()], tuple(vars(self))

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: Any) -> TokenStats:
        return cls(dict(zip(names, children, strict=True)))


class TopK(NamedTuple):
    """The top-k entries of each token, highest first, and what makes probabilities of their logits."""

    logits: Array  # (..., k)
    ids: Array  # (..., k)
    logsumexp: Array  # (...): log-probabilities are logits - logsumexp[..., None]


def token_stats(
    hidden: Array,  # (..., H)
    head: LMHead,
    labels: Array | None = None,  # (...)
    *,
    want: tuple[str, ...] = ("logprob",),
    temperature: float | Array = 1.0,
    ignore_index: int = -100,
    top_k: int = 0,
    candidates: Array | None = None,  # (..., K)
    reference: tuple[Array, LMHead] | None = None,
    jsd_beta: float = 0.5,
    memory_budget: int | None = None,
    axis_name: str | None = None,
) -> TokenStats:
    """Any per-token statistics of the head's distribution, in one pass over the vocabulary, without its logits.

    Dense equivalent:

        z = softcap(scale * (hidden @ weight.T + bias)) / temperature
        logp = jax.nn.log_softmax(z)
        logprob = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
        entropy = -(jnp.exp(logp) * logp).sum(-1)  # and so on, see docs/statistics

    hidden: (..., H) floating; labels: (...) integer, not shifted: labels[i] is the target of hidden[i]; temperature:
    positive, a number or an array that broadcasts to (...); candidates: (..., K) ids whose logits are wanted;
    reference: (hidden, head) of the policy that kl, jsd, acceptance and so on compare with, at the same temperature;
    jsd_beta: its weight in jsd's mixture; memory_budget: bytes of slices, 256 MiB unless given; axis_name: the mesh
    axis of `jax.shard_map` that the heads' rows are sharded over. want and the numbers above but temperature are known
    before tracing. Returns fp32 (fp64 for fp64 inputs) arrays of shape (...), differentiable once with respect to
    hidden, weight and bias; temperature and reference are constants. Ignored tokens get 0 and no gradient. Inside jit,
    where ids cannot be checked, an id outside of the vocabulary gives NaN (rank 0; as a candidate it leaves the tail as
    it is). 1 GEMM, 4 with gradients; one more per look at a reference.
    Raises ShapeError, DtypeError, LabelError, OptionError, and GradientError for a second derivative or forward mode.
    Memory: slices within the budget and O(N); in backward the gradients, the head's in fp32. Under `jax.vmap` all that
    for each example at once: give leading dimensions instead.
    """
    options = Options(
        want,
        ignore_index=ignore_index,
        top_k=top_k,
        jsd_beta=jsd_beta,
        memory_budget=memory_budget,
        axis_name=axis_name,
    )
    call = checked_call(
        hidden, head, labels, options, temperature=temperature, candidates=candidates, reference=reference
    )
    return TokenStats(_shaped(stats_of(call), hidden))


def linear_topk(
    hidden: Array,  # (..., H)
    head: LMHead,
    k: int,
    *,
    temperature: float | Array = 1.0,
    memory_budget: int | None = None,
    axis_name: str | None = None,
) -> TopK:
    """The k highest entries of every token and its log-sum-exp: what a decoding step keeps in the place of its logits.

    Dense equivalent:

        z = softcap(scale * (hidden @ weight.T + bias)) / temperature
        logits, ids = jax.lax.top_k(z, k)
        logsumexp = jax.nn.logsumexp(z, -1)

    hidden: (..., H) floating; k: 1..V. Logits and log-sum-exp fp32 (fp64 for fp64 inputs) and differentiable as
    `token_stats`, ids integer. For `lax.while_loop` as for jit: shapes depend on shapes alone.
    Raises ShapeError, DtypeError, OptionError, GradientError. Memory: as `token_stats`. Under `jax.vmap` the best of
    every slice are sorted, also where none is among the k: give leading dimensions instead.
    """
    options = Options(("logsumexp",), memory_budget=memory_budget, axis_name=axis_name)
    call = checked_call(hidden, head, None, options, temperature=temperature)
    k = whole_within("k", k, 1, call.vocab_size)
    stats = _shaped(stats_of(replace(call, options=replace(call.options, top_k=k))), hidden)
    return TopK(stats["top_k_logits"], stats["top_k_ids"], stats["logsumexp"])


def _shaped(stats: Stats, hidden: Array) -> Stats:
    """The statistics in the shape of the tokens."""
    lead = jnp.shape(hidden)[:-1]
    return {name: y.reshape(lead + y.shape[1:]) for name, y in stats.items()}


def stats_of(call: Call) -> Stats:
    """The wanted statistics, (N, ...) each."""
    if call.tokens.hidden.shape[0]:
        return in_reverse(_stats, call)
    shapes = jax.eval_shape(partial(values, save=False), _of_one_token(call))[0]
    return {name: jnp.zeros((0, *like.shape[1:]), like.dtype) for name, like in shapes.items()}


def _of_one_token(call: Call) -> Call:
    tokens = jax.tree.map(lambda y: jnp.zeros((1, *y.shape[1:]), y.dtype), call.tokens)
    return replace(call, tokens=tokens)


@jax.custom_vjp
def _stats(call: Call) -> Stats:
    return values(call, save=False)[0]


def _forward(call: Call) -> tuple[Stats, Any]:
    out, saved = values(call, save=True)
    return out, (call, jax.tree.map(differentiable_once, saved))


def _backward(residual: Any, upstream: Stats) -> tuple[Call]:
    call, saved = residual
    floating = {name: g for name, g in upstream.items() if g.dtype != jax.dtypes.float0}
    return (gradients(call, saved, {name: g for name, g in floating.items() if has_gradient(name)}),)


_stats.defvjp(_forward, _backward, optimize_remat=True)  # so that no policy of jax.checkpoint looks inside
