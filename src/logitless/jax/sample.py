"""`sample_tokens`: from hidden states to tokens, without the (N, V) logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from ..algebra.options import whole, whole_within
from ..algebra.rules import TEMPERATURES, Order, Rules, are_temperatures, is_drawing_temperature
from ..errors import DtypeError, NotFiniteError, OptionError
from .call import Call, Options
from .head import LMHead
from .mesh import Axes, varies, varying
from .passes.accumulate import accumulate
from .passes.chunk import Chunk
from .passes.engine import by_chunks
from .passes.slices import slices_for
from .sampling.draw import Draw
from .sampling.noise import Keys, Noise
from .sampling.record import SampleRecord
from .validate import check_same_on_all, checked_call, for_each_token, is_array, type_of


def sample_tokens(
    hidden: Array,  # (..., H)
    head: LMHead,
    noise: Noise | Array | None = None,
    *,
    temperature: float | Array = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    order: Order = "transformers",
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
    the number 0. temperature: 0 for the argmax (the lowest id of equal ones), or 1e-24..1e26; a number or an array that
    broadcasts to (...). top_k (0 is all), top_p, min_p: exact, in that order, or in "vllm"'s order min_p, top_k,
    top_p; known before tracing, as is keep: how many of the top entries the record holds, and forbidden: ids whose
    logits are -inf. axis_name: as in `token_stats`.
    No gradient. Price: one GEMM. A token whose kept entries may reach past the top 64 (or top_k, or keep, 1,024 of
    top_k at most), or any under `jax.vmap` (give leading dimensions instead), has all entries looked at, with no GEMM.
    Returns a SampleRecord of shape (...); under jit, for `lax.while_loop` too. Raises ShapeError, DtypeError,
    OptionError; NotFiniteError outside of jit for logits that are NaN or +inf, or all -inf: inside it such a token is
    -1, and its log-sum-exp is not finite.
    Memory: the logits of a few tokens within the budget (256 MiB unless given), or of one; then O(N·keep).
    """
    lead = jnp.shape(hidden)[:-1]
    rules = _unless_greedy(temperature, Rules(top_k, top_p, min_p, order))
    options = Options(("logsumexp", "entropy", "mean_logit"), memory_budget=memory_budget, axis_name=axis_name)
    call, keep = _sampling_call(hidden, head, options, rules, keep, forbidden)
    each = _each_temperature(temperature, lead, call.compute_dtype)
    keys = _keys(noise, rules, lead, varies((call.tokens.hidden, each)))
    check_same_on_all(axis_name, temperature=each, noise=keys)
    call = replace(call, tokens=varying(call.tokens, varies((each, keys))))
    if 0 in lead:
        return SampleRecord.empty(lead, keep=keep, vocab_size=call.vocab_size, dtype=call.compute_dtype)
    record = _sample(rules, keep, call, *jax.tree.map(lambda y: y.reshape(-1), (each, keys)))
    if not isinstance(record.logsumexp, Tracer) and not np.isfinite(record.logsumexp).all():
        raise NotFiniteError("head: expected finite logits, got NaN or infinity; the model has diverged")
    return record.reshape(*lead)


def _unless_greedy(temperature: float | Array, rules: Rules) -> Rules | None:
    return None if isinstance(temperature, Real) and temperature == 0 else rules


def _sampling_call(
    hidden: Array, head: LMHead, options: Options, rules: Rules | None, keep: int, forbidden: tuple[int, ...]
) -> tuple[Call, int]:
    """The checked call and `keep`; half of the budget is left for noise and for rows that are looked at whole."""
    call = lax.stop_gradient(checked_call(hidden, head, None, options))
    keep = whole_within("keep", keep, 0, call.vocab_size)
    retained = 0 if rules is None or rules.none else rules.retained(keep, call.vocab_size)
    own = {"top_k": max(1, keep, retained), "memory_budget": max(1, call.options.budget // 2)}
    forbidden = _check_forbidden(forbidden, call.vocab_size)
    return replace(call, options=replace(call.options, forbidden=forbidden, **own)), keep


@partial(jax.jit, static_argnums=(0, 1))
def _sample(rules: Rules | None, keep: int, call: Call, temperature: Array, keys: Keys) -> SampleRecord:
    slices = slices_for(call, materialise=True)

    def step(carry, fresh, each):
        """The record of a chunk."""
        tokens, temperature, keys = each
        chunk = Chunk.of(replace(call, tokens=tokens), slices.width, fresh)
        return carry, Draw(chunk, accumulate(chunk, materialise=True), temperature, keys).record(rules, keep)

    return by_chunks(step, slices.tokens, None, (call.tokens, temperature, keys))[1]


def _check_forbidden(ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    try:
        found = [whole(i) for i in ids]
    except TypeError:  # of what holds none
        found = [None]
    numbers = tuple(i for i in found if i is not None)
    if len(numbers) < len(found):
        raise OptionError(f"forbidden: expected whole numbers in a tuple, known before tracing, got {ids!r}")
    wrong = [i for i in numbers if not 0 <= i < vocab_size]
    if wrong or len(set(numbers)) >= vocab_size:
        got = wrong[0] if wrong else "all of them"
        raise OptionError(f"forbidden: expected some of the ids 0..{vocab_size - 1}, got {got}")
    return numbers


def _each_temperature(temperature: float | Array, lead: tuple[int, ...], dtype: Any) -> Array:
    """A temperature for each token, or an error that says what is wrong."""
    if isinstance(temperature, Real):
        if not is_drawing_temperature(temperature):
            raise OptionError(f"temperature: expected 0 (greedy) or a number in {TEMPERATURES}, got {temperature!r}")
    elif hasattr(temperature, "dtype") and not is_array(temperature):
        raise DtypeError(f"temperature: expected a number or an array, got {type_of(temperature)}")
    elif not isinstance(temperature, Tracer):
        values = np.asarray(temperature)
        numbers = any(jnp.issubdtype(values.dtype, kind) for kind in (jnp.integer, jnp.floating))
        if not numbers or not ((values == 0) | are_temperatures(values.astype(np.float64))).all():
            raise OptionError(f"temperature: expected 0 (greedy) or numbers in {TEMPERATURES}, got others")
    array = lax.stop_gradient(jnp.asarray(temperature, dtype))
    return for_each_token("temperature: expected a number or a shape that broadcasts", array, lead)


def _check_key(key: Any) -> None:
    """OptionError unless it is a key of `jax.random`, typed or in its words."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    if not typed and (key.dtype != jnp.uint32 or key.ndim != 1):
        got = f"an array of {key.dtype} {key.shape}"
        raise OptionError(f"noise: expected one jax.random key, got {got}; seeds go in as Noise(seeds, positions)")


def _keys(noise: Noise | Array | None, rules: Rules | None, lead: tuple[int, ...], axes: Axes) -> Keys:
    """The noise's words for each token, which vary over `axes` of a mesh; zeros where none is drawn."""
    if rules is None:
        noise = Noise(0, 0)
    elif not isinstance(noise, Noise | Array | np.ndarray):
        expected = "Noise(seeds, positions) or a jax.random key"
        got = None if noise is None else type_of(noise)
        raise OptionError(f"noise: expected {expected}, got {got}; only temperature=0 does without")
    elif not isinstance(noise, Noise):
        _check_key(noise)
        noise = Noise.draw(noise, lead, axes)
    return noise.expand(lead)
