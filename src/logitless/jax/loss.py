"""`linear_cross_entropy`: the loss is known with a chunk's numbers, so its gradient is formed at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..algebra.options import check_cross_entropy, check_reduction
from .checks import check_denominator, flatten
from .engine import Stats, cotangents, formed, values
from .head import LMHead
from .problem import Operands, Spec
from .stats import stats_of
from .tiles import compute_dtype


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of each token from its statistics."""

    smoothing: float
    z_loss: float

    @property
    def want(self) -> tuple[str, ...]:
        lse = ("logsumexp",) if self.smoothing or self.z_loss else ()
        return ("logprob", *lse, *(("mean_logit",) if self.smoothing else ()))

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
    Raises what `token_stats` raises. Memory: a chunk's whole rows within the budget, and the gradients, the head's
    in fp32; without a gradient slices within the budget, 1 GEMM.
    Label smoothing: Szegedy et al., arXiv 1512.00567; z-loss: Chowdhery et al., arXiv 2204.02311.
    """
    check_reduction(reduction)
    check_cross_entropy(label_smoothing, z_loss)
    recipe = CrossEntropy(float(label_smoothing), float(z_loss))
    spec, x = flatten(
        hidden, head, labels, want=recipe.want, temperature=temperature, ignore_index=ignore_index,
        memory_budget=memory_budget, axis_name=axis_name,
    )  # fmt: skip
    compute = compute_dtype(x.tokens.hidden)
    divisor = check_denominator(denominator, reduction, compute)
    if reduction == "none":
        return recipe(stats_of(spec, x)).reshape(jnp.shape(hidden)[:-1])
    if x.tokens.hidden.shape[0] == 0:
        return jnp.zeros((), compute)
    if divisor is None:
        count = (x.tokens.labels != ignore_index).sum() if reduction == "mean" else 1
        divisor = jnp.maximum(count, 1).astype(compute)
    return _loss(spec, recipe, x, 1 / lax.stop_gradient(divisor))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(spec: Spec, recipe: CrossEntropy, x: Operands, scale: Array) -> Array:
    stats = values(spec, False, x)[0]
    return recipe(stats).sum() * scale


def _forward(spec: Spec, recipe: CrossEntropy, x: Operands, scale: Array) -> tuple[Array, Any]:
    loss, gradients = formed(spec, recipe, x, scale)
    return loss.sum() * scale, (x, gradients)


def _backward(spec: Spec, recipe: CrossEntropy, residual: Any, up: Array) -> tuple[Operands, None]:
    x, (dh, dw, db) = residual
    return cotangents(x, dh, dw, db, up), None


_loss.defvjp(_forward, _backward)
