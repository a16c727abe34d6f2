"""Some tokens of a call before this device's part of the head, and the slices of their logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..algebra.fold import MASK, Totals, difference
from .mesh import from_owner, varies, varying
from .problem import Operands, Spec, first_row, local_rows
from .tiles import Projection, Window, column, compute_dtype, window, windows

Kept = Any  # the logits of all slices: (slices, C, S) each for policy and reference


class Tile(NamedTuple):
    """A slice of logits, and which of its entries are what."""

    start: Array
    w: Array  # (S, H)
    z: Array  # (C, S)
    z_ref: Array | None
    fresh: Array  # (S,) whether the entry exists and no slice before had it
    at_label: Array | None  # (C, S)

    @property
    def out(self) -> Array:
        """The entries that the fold leaves out: stale ones, and the label."""
        return ~self.fresh if self.at_label is None else self.at_label | ~self.fresh

    def log_p(self, totals: Totals) -> Array:
        return (jnp.maximum(self.z, MASK) - column(totals.m)) - column(totals.log_s)

    def log_q(self, totals: Totals) -> Array:
        z_ref: Any = self.z_ref
        return (jnp.maximum(z_ref, MASK) - column(totals.m_ref)) - column(totals.log_s_ref)

    def log_ratio(self, totals: Totals) -> Array:
        """log p - log q, never from two rounded log-probs."""
        return difference(self.z, self.z_ref, column(totals.shift), jnp) + column(totals.log_ratio)


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a call, with this device's part of the head; `first` is the id of its first row."""

    spec: Spec
    policy: Projection
    reference: Projection | None
    counts: Array  # (C,) whether the token is neither ignored nor another chunk's
    labels: Array | None  # (C,)
    label: tuple[Array, Array | None] | None  # the label's logit and reference logit
    candidates: Array | None  # (C, K)
    rows: int
    first: Array | int
    width: int
    axes: tuple[str, ...]  # of the mesh, that the operands vary over

    @classmethod
    def of(cls, spec: Spec, x: Operands, width: int, fresh: Array) -> Chunk:
        t, compute = x.tokens, compute_dtype(x.tokens.hidden)
        counts = fresh if t.labels is None else fresh & (t.labels != spec.ignore_index)
        temperature = spec.temperature if t.temperature is None else t.temperature

        def clean(h: Array) -> Array:  # what an ignored token holds reaches nobody
            return jnp.where(counts[:, None], h, jnp.zeros_like(h))

        policy = Projection.of(clean(t.hidden), x.weight, x.bias, spec.scale, spec.softcap, temperature, compute)
        reference = None
        if t.ref_hidden is not None and x.ref_weight is not None:
            reference = Projection.of(
                clean(t.ref_hidden), x.ref_weight, x.ref_bias, spec.ref_scale, spec.ref_softcap, temperature, compute
            )
        rows, first = local_rows(spec, x), first_row(spec, x)
        labels = None if t.labels is None else jnp.where(counts, t.labels, 0)
        label = None
        if labels is not None:
            ref = None if reference is None else entry(spec, reference, labels, rows, first)
            label = entry(spec, policy, labels, rows, first), ref
        return cls(spec, policy, reference, counts, labels, label, t.candidates, rows, first, width, varies(x))

    def tile(self, i: Array, kept: Kept = None) -> Tile:
        """The i-th slice, from `kept` logits where there are."""
        place, ids = self.place(i)
        exists = None if self.spec.axis is None else ids < self.spec.rows
        w = self.policy.operand(place.start, self.width, exists)
        if kept is not None:
            z, z_ref = kept
        else:
            z, z_ref = self.policy.logits(w, place.start), None
            if self.reference is not None:
                z_ref = self.reference.logits(self.reference.operand(place.start, self.width, exists), place.start)
        at_label = None if self.labels is None else ids[None, :] == self.labels[:, None]
        return Tile(place.start, w, z, z_ref, place.fresh, at_label)

    def place(self, i: Array) -> tuple[Window, Array]:
        """Where the i-th slice lies in this device's rows, and its ids; fresh: those that exist."""
        place = window(i, self.width, self.rows)
        ids = self.first + place.start + jnp.arange(self.width, dtype=place.start.dtype)
        if self.spec.axis is not None:
            place = place._replace(fresh=place.fresh & (ids < self.spec.rows))
        if self.spec.forbidden:
            place = place._replace(fresh=place.fresh & ~jnp.isin(ids, jnp.asarray(self.spec.forbidden)))
        return place, ids

    def slices(self) -> Array:
        return jnp.arange(windows(self.width, self.rows), dtype=jnp.int32)

    def zeros(self, *shape: int) -> Array:
        return varying(jnp.zeros((self.counts.shape[0], *shape), self.policy.compute), self.axes)


def entry(spec: Spec, projection: Projection, ids: Array, rows: int, first: Array | int) -> Array:
    """z at one entry per token, (C,) -> (C,), on whichever device its row is; NaN outside of the vocabulary."""
    here = jnp.clip(ids - first, 0, rows - 1)
    z = from_owner(projection.at(here), here == ids - first, spec.axis)
    return jnp.where((ids >= 0) & (ids < spec.rows), z, jnp.nan)
