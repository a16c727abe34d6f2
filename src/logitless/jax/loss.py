"""`linear_cross_entropy`: the loss is known with a chunk's statistics, so its gradient is formed at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..algebra.options import check_cross_entropy, check_reduction
from ..algebra.stats import cross_entropy_wants
from .call import Call, Options
from .head import LMHead
from .mesh import varies, varying
from .passes.engine import Stats, cotangents, differentiable_once, in_reverse, loss_and_gradients, values
from .stats import stats_of
from .validate import check_denominator, check_known, check_same_on_all, checked_call


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of each token from its statistics."""

    smoothing: float
    z_loss: float

    @property
    def want(self) -> tuple[str, ...]:
        """The statistics that it reads."""
        return cross_entropy_wants(self.smoothing, self.z_loss)

    def __call__(self, stats: Stats) -> Array:
        loss = -(1 - self.smoothing) * stats["logprob"]
        if self.smoothing:
            loss = loss + self.smoothing * (stats["logsumexp"] - stats["mean_logit"])
        return loss + self.z_loss * jnp.square(stats["logsumexp"]) if self.z_loss else loss


def linear_cross_entropy(
    hidden: Array,  # (..., H)
    head: LMHead,
    labels: Array,  # (...)
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    denominator: float | Array | None = None,
    temperature: float | Array = 1.0,
    ignore_index: int = -100,
    memory_budget: int | None = None,
    axis_name: str | None = None,
) -> Array:
    """Cross-entropy of the head's logits with integer labels, loss and gradients in 3 GEMMs.

    Dense equivalent:

        z = softcap(scale * (hidden @ weight.T + bias)) / temperature
        loss = -jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], -1)[:, 0]
        jnp.where(labels == -100, 0, loss).sum() / (labels != -100).sum()

    hidden: (..., H); labels: (...) integer, not shifted, `ignore_index` where a token does not count.
    reduction: "mean", "sum" or "none" (4 GEMMs); denominator: divides the sum in the place of the number of tokens
    that count, a constant: where tokens are sharded too, pass the number on all devices and add the losses up.
    The other options are those of `token_stats`. Returns fp32 (fp64 for fp64 inputs); a mean over no token is 0.
    Raises what `token_stats` raises. Memory: the materialised slices of a chunk of tokens within the budget, and the
    gradients, the head's in fp32; without a gradient slices within the budget, 1 GEMM. Under `jax.vmap` all that for
    each example at once, in a `lax.scan` the gradients of each step: give leading dimensions, `jax.checkpoint` a step.
    Label smoothing: Szegedy et al., arXiv 1512.00567; z-loss: Chowdhery et al., arXiv 2204.02311.
    """
    check_reduction(reduction)
    check_known(label_smoothing=label_smoothing, z_loss=z_loss)
    check_cross_entropy(label_smoothing, z_loss)
    token_loss = CrossEntropy(*(float(np.asarray(x).item()) for x in (label_smoothing, z_loss)))  # of any one number
    options = Options(token_loss.want, ignore_index=ignore_index, memory_budget=memory_budget, axis_name=axis_name)
    call = checked_call(hidden, head, labels, options, temperature=temperature)
    divisor = check_denominator(denominator, reduction, call.compute_dtype)
    check_same_on_all(axis_name, denominator=divisor)
    if reduction == "none":
        return token_loss(stats_of(call)).reshape(jnp.shape(hidden)[:-1])
    if call.tokens.hidden.shape[0] == 0:
        return jnp.zeros((), call.compute_dtype)
    if divisor is None:
        count = (call.tokens.labels != ignore_index).sum() if reduction == "mean" else 1
        divisor = jnp.maximum(count, 1).astype(call.compute_dtype)
    call = replace(call, tokens=varying(call.tokens, varies(divisor)))
    return in_reverse(_loss, token_loss, call, 1 / lax.stop_gradient(divisor))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(token_loss: CrossEntropy, call: Call, scale: Array) -> Array:
    stats = values(call, save=False)[0]
    return token_loss(stats).sum() * scale


def _forward(token_loss: CrossEntropy, call: Call, scale: Array) -> tuple[Array, Any]:
    loss, gradients = loss_and_gradients(token_loss, call, scale)
    return loss.sum() * scale, (call, jax.tree.map(differentiable_once, gradients))


def _backward(token_loss: CrossEntropy, residual: Any, upstream: Array) -> tuple[Call, None]:
    call, (dh, dw, db) = residual
    return cotangents(call, dh, dw, db, upstream), None


_loss.defvjp(_forward, _backward, optimize_remat=True)  # so that no policy of jax.checkpoint looks inside
