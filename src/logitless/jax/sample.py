"""`sample_tokens`: from hidden states to tokens, without the (N, V) logits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from ..algebra.rules import Rules
from ..errors import NotFiniteError, OptionError, ShapeError
from .checks import flatten
from .chunk import Chunk
from .draw import Draw
from .engine import by_chunks
from .fold import fold
from .head import LMHead
from .noise import Keys, Noise
from .problem import Operands, Spec, slices_for
from .record import SampleRecord, check_keep
from .tiles import compute_dtype


def sample_tokens(
    hidden: Array,  # (..., H)
    head: LMHead,
    noise: Noise | Array | None = None,
    *,
    temperature: float | Array = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    keep: int = 10,
    forbidden: tuple[int, ...] = (),
    memory_budget: int | None = None,
    axis_name: str | None = None,
) -> SampleRecord:
    """One token for each hidden state, and a record of the distribution that it was drawn from.

    Dense equivalent, up to which random numbers come:

        z = softcap(scale * (hidden @ weight.T + bias))
        token = jax.random.categorical(key, min_p(top_p(top_k(z / temperature))))

    noise: Noise(seeds, positions), by which a token depends on nothing but its sequence's own seed, its position and
    its logits: the same token whatever the slices, the batch's order or the devices, and the same as torch's
    `logitless.sample_tokens` draws; or a `jax.random` key, for a seed of each token's own; needed unless temperature is
    the number 0. temperature: 0 for the best entry (the lowest id of equal ones), or more; a number or an array that
    broadcasts to (...). top_k (0 is all), top_p, min_p: exact, in that order, known before tracing, as is keep: how
    many of the best entries the record holds, and forbidden: ids whose logits are -inf. axis_name: as in `token_stats`.
    No gradient.
    Price: one GEMM. A token whose kept entries may reach past the best 64 (or top_k, or keep, 1,024 of top_k at most)
    has its row looked at again, with no GEMM: nothing is approximate.
    Returns a SampleRecord of shape (...); under jit, for `lax.while_loop` too. Raises ShapeError, DtypeError,
    OptionError; NotFiniteError outside of jit, inside the record's log-sum-exp is NaN.
    Memory: whole rows of a few tokens within the budget (256 MiB unless given), or of one; then O(N·keep).
    """
    lead = jnp.shape(hidden)[:-1]
    rules = None if isinstance(temperature, Real) and temperature == 0 else Rules(top_k, top_p, min_p)
    spec, x = _flat(hidden, head, rules, keep, memory_budget, axis_name)
    spec = replace(spec, forbidden=_check_forbidden(forbidden, spec.rows))
    heat, keys = _heat(temperature, lead, compute_dtype(hidden)), _keys(noise, rules, lead)
    n = math.prod(lead)
    if n == 0:
        return SampleRecord.empty(lead, keep=keep, vocab_size=spec.rows, dtype=heat.dtype)
    record = _sample(spec, rules, keep, x, *jax.tree.map(lambda y: y.reshape(n), (heat, keys)))
    if not isinstance(record.logsumexp, Tracer) and not np.isfinite(record.logsumexp).all():
        raise NotFiniteError("head: expected finite logits, got NaN or infinity; the model has diverged")
    return record.reshape(*lead)


def _flat(
    hidden: Array, head: LMHead, rules: Rules | None, keep: int, budget: int | None, axis: str | None
) -> tuple[Spec, Operands]:
    """The checked call; half of the budget is left for noise and for whole rows."""
    hidden, head = lax.stop_gradient((hidden, head))
    want = ("logsumexp", "entropy", "mean_logit")
    spec, x = flatten(
        hidden, head, None, want=want, temperature=1.0, ignore_index=-100, memory_budget=budget, axis_name=axis
    )
    check_keep(keep, spec.rows)
    wanted = 0 if rules is None or rules.none else rules.retained(keep, spec.rows)
    return replace(spec, top_k=max(1, keep, wanted), budget=max(1, spec.budget // 2)), x


@partial(jax.jit, static_argnums=(0, 1, 2))
def _sample(spec: Spec, rules: Rules | None, keep: int, x: Operands, heat: Array, keys: Keys) -> SampleRecord:
    slices = slices_for(spec, x, whole=True)

    def step(carry, fresh, each):
        tokens, heat, keys = each
        chunk = Chunk.of(spec, x._replace(tokens=tokens), slices.width, fresh)
        return carry, Draw(chunk, fold(chunk, keep=True), heat, keys).record(rules, keep)

    return by_chunks(step, slices.tokens, None, (x.tokens, heat, keys))[1]


def _check_forbidden(ids: tuple[int, ...], rows: int) -> tuple[int, ...]:
    ids = tuple(int(i) for i in ids)
    wrong = [i for i in ids if not 0 <= i < rows]
    if wrong or len(set(ids)) >= rows:
        got = wrong[0] if wrong else "all of them"
        raise OptionError(f"forbidden: expected some of the ids 0..{rows - 1}, got {got}")
    return ids


def _heat(temperature: float | Array, lead: tuple[int, ...], dtype: Any) -> Array:
    """A temperature for each token, or an error that says what is wrong."""
    if isinstance(temperature, Real):
        if isinstance(temperature, bool) or not 0 <= temperature < math.inf:
            raise OptionError(f"temperature: expected a number of 0 (greedy) or more, got {temperature!r}")
    elif not isinstance(temperature, Tracer):
        each = np.asarray(temperature)
        numbers = any(jnp.issubdtype(each.dtype, kind) for kind in (jnp.integer, jnp.floating))
        if not numbers or not ((each >= 0) & np.isfinite(each)).all():
            raise OptionError("temperature: expected finite values of 0 (greedy) or more, got others")
    heat = jnp.asarray(temperature, dtype)
    try:
        return jnp.broadcast_to(heat, lead)
    except ValueError:
        raise ShapeError(
            f"temperature: expected a number or a shape that broadcasts to {lead}, got {heat.shape}"
        ) from None


def _keys(noise: Noise | Array | None, rules: Rules | None, lead: tuple[int, ...]) -> Keys:
    """The noise's words for each token; zeros where none is drawn."""
    if rules is None:
        noise = Noise(0, 0)
    elif not isinstance(noise, Noise | Array | np.ndarray):
        expected = "Noise(seeds, positions) or a jax.random key"
        raise OptionError(f"noise: expected {expected}, got {noise!r}; only temperature=0 does without")
    elif not isinstance(noise, Noise):
        noise = Noise.draw(noise, lead)
    return noise.expand(lead)
