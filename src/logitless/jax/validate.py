"""What a call's arrays and options must be, and the flat `Call` that they become."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from ..algebra.options import check_ignore_index, check_numbers, check_want, is_number
from ..algebra.rules import TEMPERATURES, are_temperatures, is_temperature
from ..errors import ConfigError, DtypeError, LabelError, OptionError, ShapeError
from .call import Call, Options, Tokens, compute_dtype
from .head import LMHead
from .mesh import varies

Lead = tuple[int, ...]


def checked_call(
    hidden: Array,
    head: LMHead,
    labels: Array | None,
    options: Options,
    *,
    temperature: float | Array = 1.0,
    candidates: Array | None = None,
    reference: tuple[Array, LMHead] | None = None,
) -> Call:
    """The call with its options checked, arrays with their leading dimensions flattened."""
    hidden = _floating("hidden", hidden)
    vocab_size = _check_head("head", head, hidden, options.axis_name)
    lead = hidden.shape[:-1]
    n = math.prod(lead)
    ref_hidden, ref_head = _check_reference(reference, lead, head, vocab_size, options.axis_name)
    want = check_want(options.want, labels is not None, reference is not None, candidates is not None)
    check_numbers(vocab_size, options.top_k, options.jsd_beta, options.memory_budget)
    check_known(ignore_index=options.ignore_index)
    check_ignore_index(options.ignore_index, bits=32)
    if labels is not None:
        labels = _check_ids("labels", labels, lead, vocab_size, options.ignore_index).reshape(n)
    if candidates is not None:
        width = jnp.shape(candidates)[-1:]
        if not width:
            raise ShapeError(f"candidates: expected shape ({', '.join([*map(str, lead), 'K'])}), got ()")
        candidates = _check_ids("candidates", candidates, (*lead, *width), vocab_size).reshape(n, *width)
    each = _check_temperature(temperature, lead, compute_dtype(hidden))
    check_same_on_all(
        options.axis_name, hidden=hidden, labels=labels, candidates=candidates, temperature=each, reference=ref_hidden
    )
    options = replace(
        options,
        want=want,
        ignore_index=int(options.ignore_index),
        top_k=int(options.top_k),
        jsd_beta=float(options.jsd_beta),
        memory_budget=options.budget,
    )
    tokens = Tokens(hidden.reshape(n, hidden.shape[-1]), labels, each, candidates)
    if ref_head is None or ref_hidden is None:
        return Call(options, vocab_size, tokens, _plain(head))
    # The reference is a constant, inside its own gradient too.
    ref_hidden, ref_head = lax.stop_gradient((ref_hidden.reshape(n, ref_hidden.shape[-1]), _plain(ref_head)))
    return Call(options, vocab_size, tokens._replace(ref_hidden=ref_hidden), _plain(head), ref_head)


def check_same_on_all(axis_name: str | None, **arrays: Any) -> None:
    """Raise OptionError for what varies over the vocabulary's axis, along which the parts of a token are merged."""
    for name, x in arrays.items():
        if axis_name in varies(x):
            raise OptionError(
                f"{name}: expected the same on all devices of {axis_name!r}, the vocabulary's axis, got one "
                "that varies over it; shard tokens over another axis, or give jax.lax.all_gather(..., to='invarying')"
            )


def check_denominator(denominator: float | Array | None, reduction: str, dtype: jnp.dtype) -> Array | None:
    """What divides the sum of a loss, as a scalar."""
    if denominator is None:
        return None
    if reduction != "mean":
        raise OptionError(f"denominator: it divides the sum where reduction='mean', got reduction={reduction!r}")
    real = is_array(denominator) and not is_array(denominator, np.complexfloating)
    if not real and not isinstance(denominator, Real):
        raise OptionError(f"denominator: expected a positive number, got {dtype_of(denominator)}")
    if jnp.size(denominator) != 1:
        raise OptionError(f"denominator: expected one number, got shape {jnp.shape(denominator)}")
    known = None if isinstance(denominator, Tracer) else np.asarray(denominator).item()
    if known is not None and not (is_number(known) and 0 < known <= float(jnp.finfo(dtype).max)):
        raise OptionError(f"denominator: expected a positive number, finite in {dtype}, got {denominator}")
    return jnp.asarray(denominator, dtype).reshape(())


def is_array(x: Any, of: Any = np.number) -> bool:
    """Whether it is an array of such numbers; one whose dtype JAX cannot read, torch's say, is none."""
    try:
        return jnp.issubdtype(x.dtype, of)
    except (AttributeError, TypeError):
        return False


def dtype_of(x: Any) -> str:
    """An array's dtype, or the type of what is none: what errors say that they got."""
    return str(x.dtype) if isinstance(x, Array | np.ndarray | np.generic) else type_of(x)


def type_of(x: Any) -> str:
    """Its class with the module that it is of, for torch has classes of the same names."""
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _plain(head: LMHead) -> LMHead:
    """The head with jax arrays and Python numbers, so that numpy's do not widen what they multiply."""
    return replace(
        head,
        weight=jnp.asarray(head.weight),
        bias=None if head.bias is None else jnp.asarray(head.bias),
        scale=float(head.scale),
        softcap=None if head.softcap is None else float(head.softcap),
    )


def _floating(name: str, x: Any) -> Array:
    if not is_array(x, jnp.floating):
        raise DtypeError(f"{name}: expected a floating-point array, got {dtype_of(x)}")
    return jnp.asarray(x)


def _check_head(name: str, head: LMHead, hidden: Array, axis_name: str | None) -> int:
    """The vocabulary's size, on all devices."""
    if not isinstance(head, LMHead):
        raise DtypeError(f"{name}: expected a logitless.jax.LMHead, got {type_of(head)}; use LMHead(weight)")
    if type(head.weight).__name__ == "QuantisedWeight":  # of the torch side, which is not imported here
        raise ConfigError(f"{name} weight: expected an array, got a QuantisedWeight; dequantise it first")
    weight = _floating(f"{name} weight", head.weight)
    if weight.ndim != 2 or weight.shape[0] == 0:
        raise ShapeError(f"{name} weight: expected (vocab, hidden) with at least one row, got {weight.shape}")
    if head.bias is not None and _floating(f"{name} bias", head.bias).shape != weight.shape[:1]:
        raise ShapeError(f"{name} bias: expected shape {weight.shape[:1]}, one per row, got {head.bias.shape}")
    if hidden.ndim == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"hidden: expected (..., {weight.shape[1]}), the width of the {name}'s weight {weight.shape}, "
            f"got {hidden.shape}; give what the head is called with rather than its logits, and a weight (vocab, "
            "hidden)"
        )
    rows = weight.shape[0]
    if axis_name is not None:
        if axis_name not in varies(weight):
            raise OptionError(
                f"axis_name: expected a {name} whose rows are sharded over {axis_name!r}, in jax.shard_map with its "
                f"check_vma, got a weight that varies over {varies(weight) or 'no axis'}"
            )
        rows *= lax.axis_size(axis_name)
    if head.vocab_size is not None and head.vocab_size > rows:
        raise OptionError(
            f"{name}: vocab_size: expected a whole number in 1..{rows} (the weight's rows), got {head.vocab_size}"
        )
    return head.vocab_size or rows


def _check_reference(
    reference: tuple[Array, LMHead] | None, lead: Lead, policy: LMHead, vocab_size: int, axis_name: str | None
) -> tuple[Array | None, LMHead | None]:
    if reference is None:
        return None, None
    if not (isinstance(reference, tuple) and len(reference) == 2):
        raise OptionError(f"reference: expected (hidden, head), got {type(reference).__name__}")
    hidden, head = _floating("reference hidden", reference[0]), reference[1]
    ref_size = _check_head("reference head", head, hidden, axis_name)
    if hidden.shape[:-1] != lead:
        raise ShapeError(f"reference hidden: expected leading dimensions {lead}, hidden's, got {hidden.shape[:-1]}")
    if ref_size != vocab_size:
        raise ShapeError(
            f"reference: expected a head over the same vocabulary ({vocab_size} entries), got {ref_size}; "
            "set vocab_size on both"
        )
    rows, got = policy.weight.shape[0], head.weight.shape[0]
    if axis_name is not None and got != rows:
        raise ShapeError(
            f"reference: expected {rows} rows on each device, as the head has, got {got}; pad both weights alike"
        )
    return hidden, head


def _check_ids(name: str, ids: Array, shape: Lead, vocab_size: int, ignore_index: int | None = None) -> Array:
    if not is_array(ids, jnp.integer):
        raise DtypeError(f"{name}: expected an array of integer ids, got {dtype_of(ids)}")
    if ids.shape != shape:
        raise ShapeError(f"{name}: expected shape {shape}, hidden's leading dimensions, got {ids.shape}")
    if not isinstance(ids, Tracer):
        found = np.asarray(ids)
        outside = (found < 0) | (found >= vocab_size)
        wrong = found[outside if ignore_index is None else outside & (found != ignore_index)]
        if wrong.size:
            hint = "" if ignore_index is None else f" or ignore_index={ignore_index}"
            raise LabelError(
                f"{name}: expected ids in 0..{vocab_size - 1}{hint}, got {wrong[0]}; fix the ids or vocab_size"
            )
    ids = jnp.asarray(ids)
    held, narrow = jnp.iinfo(ids.dtype), jnp.iinfo(jnp.int32)
    if held.max > narrow.max:  # a number that int32 cannot hold is no id that it would become
        known = (ids >= 0) & (ids < vocab_size)
        if ignore_index is not None and held.min <= ignore_index:
            known = known | (ids == ignore_index)
        ids = jnp.where(known, ids, vocab_size)
    return ids.astype(jnp.int32)


def check_known(**numbers: Any) -> None:
    """Raise OptionError for numbers that a trace would have to know."""
    for name, x in numbers.items():
        if isinstance(x, Tracer):
            raise OptionError(f"{name}: expected a number known before tracing, got a traced one; make it static")


def _check_temperature(temperature: float | Array, lead: Lead, dtype: jnp.dtype) -> Array | None:
    """One for each token; None where it is 1. A number is an array, too, so that another compiles nothing anew."""
    if isinstance(temperature, Real):
        if not is_temperature(temperature):
            raise OptionError(
                f"temperature: expected a number in {TEMPERATURES} or an array of such, got {temperature!r}"
            )
        return None if temperature == 1 else jnp.full(math.prod(lead), float(temperature), dtype)
    each = lax.stop_gradient(_floating("temperature", temperature))
    values = None if isinstance(each, Tracer) else np.asarray(each, np.float64)
    if values is not None and not bool(are_temperatures(values).all()):
        raise OptionError(
            f"temperature: expected values in {TEMPERATURES}, got some that are zero, negative, infinite or NaN"
        )
    each = for_each_token("temperature: expected a number or a shape that broadcasts", each, lead)
    return each.reshape(math.prod(lead))


def for_each_token(expected: str, x: Array, lead: Lead) -> Array:
    """`x` broadcast to the shape of the tokens, or a ShapeError that says what was expected."""
    try:
        return jnp.broadcast_to(x, lead)
    except ValueError:
        raise ShapeError(f"{expected} to {lead}, got {jnp.shape(x)}") from None
