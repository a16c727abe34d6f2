"""Some tokens of a call before this device's part of the head, and the slices of their logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ...algebra.online_softmax import MASK, Totals, difference
from ..call import Call, Options
from ..mesh import from_owner, varies, varying
from .projection import Projection, column
from .windows import Window, window, windows

Materialised = Any  # the logits of all slices: (slices, C, S) each for policy and reference


class Slice(NamedTuple):
    """A slice of the vocabulary: its rows of W and logits, and which of its entries are what."""

    start: Array
    weight: Array  # (S, H)
    z: Array  # (C, S)
    z_ref: Array | None
    fresh: Array  # (S,) whether the entry exists and no slice before had it
    at_label: Array | None  # (C, S)

    @property
    def left_out(self) -> Array:
        """The entries that the accumulation leaves out: stale ones, and the label."""
        return ~self.fresh if self.at_label is None else self.at_label | ~self.fresh

    def log_p(self, totals: Totals) -> Array:
        """The policy's log-probabilities."""
        return (jnp.maximum(self.z, MASK) - column(totals.m)) - column(totals.log_s)

    def log_q(self, totals: Totals) -> Array:
        """The reference's log-probabilities."""
        z_ref: Any = self.z_ref
        return (jnp.maximum(z_ref, MASK) - column(totals.m_ref)) - column(totals.log_s_ref)

    def log_ratio(self, totals: Totals) -> Array:
        """log p - log q, never from two rounded log-probs."""
        return difference(self.z, self.z_ref, column(totals.shift), jnp) + column(totals.log_ratio)


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a call, with this device's part of the head."""

    call: Call  # of these tokens alone
    width: int  # entries of a slice
    valid: Array  # (C,) whether the token is neither ignored nor another chunk's
    policy: Projection
    reference: Projection | None
    labels: Array | None  # (C,), 0 for tokens that are not valid
    label_logits: tuple[Array, Array | None] | None  # the policy's and the reference's, (C,) each
    vocab_start: Array | int
    axes: tuple[str, ...]  # of the mesh, that the operands vary over

    @classmethod
    def of(cls, call: Call, width: int, fresh: Array) -> Chunk:
        """The chunk of all tokens of `call`, those that no chunk before had being `fresh`."""
        tokens, compute = call.tokens, call.compute_dtype
        valid = fresh if tokens.labels is None else fresh & (tokens.labels != call.options.ignore_index)
        temperature = 1.0 if tokens.temperature is None else tokens.temperature

        def clean(h: Array) -> Array:  # what an ignored token holds reaches nobody
            return jnp.where(valid[:, None], h, jnp.zeros_like(h))

        policy = Projection.of(clean(tokens.hidden), call.head, temperature, compute)
        reference = None
        if tokens.ref_hidden is not None and call.reference is not None:
            reference = Projection.of(clean(tokens.ref_hidden), call.reference, temperature, compute)
        labels = label_logits = None
        if tokens.labels is not None:
            labels = jnp.where(valid, tokens.labels, 0)
            label_ref = None if reference is None else logits_at(call, reference, labels)
            label_logits = logits_at(call, policy, labels), label_ref
        return cls(
            call=call,
            width=width,
            valid=valid,
            policy=policy,
            reference=reference,
            labels=labels,
            label_logits=label_logits,
            vocab_start=call.vocab_start,
            axes=varies(call),
        )

    @property
    def options(self) -> Options:
        """The call's options."""
        return self.call.options

    def slice_at(self, i: Array, logits: tuple[Array, Array | None] | None = None) -> Slice:
        """The i-th slice, of materialised `logits` (policy's, reference's) where there are."""
        place, ids = self.place(i)
        exists = None if self.options.axis_name is None else ids < self.call.vocab_size
        weight = self.policy.operand(place.start, self.width, exists)
        if logits is not None:
            z, z_ref = logits
        else:
            z, z_ref = self.policy.logits(weight, place.start), None
            if self.reference is not None:
                z_ref = self.reference.logits(self.reference.operand(place.start, self.width, exists), place.start)
            if self.options.forbidden:
                z = jnp.where(jnp.isin(ids, jnp.asarray(self.options.forbidden)), -jnp.inf, z)
        at_label = None if self.labels is None else ids[None, :] == self.labels[:, None]
        return Slice(place.start, weight, z, z_ref, place.fresh, at_label)

    def place(self, i: Array) -> tuple[Window, Array]:
        """Where the i-th slice lies in this device's rows, and its ids; fresh: those that exist."""
        place = window(i, self.width, self.call.local_rows)
        ids = self.vocab_start + place.start + jnp.arange(self.width, dtype=place.start.dtype)
        fresh = place.fresh
        if self.options.axis_name is not None:
            fresh = fresh & (ids < self.call.vocab_size)
        return place._replace(fresh=fresh), ids

    def in_tail(self, part: Slice) -> Array:
        """Which of a slice's entries exist and are no candidates, (C, S)."""
        ids: Any = self.call.tokens.candidates
        columns = ids - (self.vocab_start + part.start)
        columns = jnp.where(columns < 0, part.z.shape[1], columns)  # out of range, where it is dropped
        rows = jnp.arange(ids.shape[0])[:, None]
        return jnp.broadcast_to(part.fresh, part.z.shape).at[rows, columns].set(False, mode="drop")

    def slices(self) -> Array:
        """The numbers of the slices, to scan over."""
        return jnp.arange(windows(self.width, self.call.local_rows), dtype=jnp.int32)

    def zeros(self, *shape: int) -> Array:
        """Zeros for each token, (C, *shape), as the state of a loop over slices."""
        return varying(jnp.zeros((self.valid.shape[0], *shape), self.policy.compute), self.axes)


def logits_at(call: Call, projection: Projection, ids: Array) -> Array:
    """z at one entry per token, (C,) -> (C,), on whichever device its row is; NaN outside of the vocabulary."""
    row = ids - call.vocab_start
    here = jnp.clip(row, 0, call.local_rows - 1)
    z = from_owner(projection.at(here), here == row, call.options.axis_name)
    return jnp.where((ids >= 0) & (ids < call.vocab_size), z, jnp.nan)
