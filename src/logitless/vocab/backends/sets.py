"""The entries that tokens have each of their own, ragged, and their online softmax.

A chunk's entries stand end to end, (M,), with the place of each token's first in `offsets`. Sums over a token's entries
are sums over its segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algebra.online_softmax import EMPTY, MASK, Accumulation, difference, times


@dataclass
class Entries:
    """The entries of a chunk's tokens: ids and each one's token, (M,); where segments begin and end, (C + 1,).

    start: the first entry's place among the call's; labels_at: (C,), where each token's label stands here.
    """

    ids: Tensor
    tokens: Tensor
    offsets: Tensor
    start: int
    labels_at: Tensor | None

    @property
    def counts(self) -> Tensor:
        return self.offsets.diff()

    def sum(self, x: Tensor) -> Tensor:  # (M,) -> (C,)
        return torch.segment_reduce(x, "sum", offsets=self.offsets, initial=0)

    def max(self, x: Tensor, initial: float) -> Tensor:  # (M,) -> (C,)
        return torch.segment_reduce(x, "max", offsets=self.offsets, initial=initial)

    def without_labels(self, x: Tensor) -> Tensor:
        """x as logits, MASK where they are -inf or the label's own."""
        x = x.clamp(min=MASK)
        return x if self.labels_at is None else x.index_fill(0, self.labels_at, MASK)


def accumulate(
    sums: frozenset[str], label: Tensor | None, entries: Entries, z: Tensor, z_ref: Tensor | None
) -> tuple[Accumulation, Tensor | None]:
    """The online softmax of each token's entries but its label, and the sum of all its logits where that is wanted.

    label: (C,), the labels' logits; z, z_ref: (M,), the entries'.
    """
    own = entries.tokens
    open_z = entries.without_labels(z)
    m = entries.max(open_z, EMPTY)
    x = open_z - m[own]
    w = torch.exp(x)
    best = x == 0  # their own ones are counted, not added: they would swallow the others' digits
    rest = entries.sum(w.masked_fill(best, 0.0)) + (entries.sum(best.to(w.dtype)) - 1).clamp(min=0)
    state = Accumulation(m, rest)
    if "t" in sums:
        state.t = entries.sum(w * x)
    if "r" in sums:
        state.r = entries.sum(w * w)
    if "above" in sums and label is not None:
        state.above = entries.sum((open_z > label.clamp(min=MASK)[own]).to(w.dtype)).long()
    if z_ref is not None:
        _add_reference(state, entries, (z, z_ref), (open_z, entries.without_labels(z_ref)), w, "qe" in sums)
    return state, entries.sum(z) if "zsum" in sums else None


def _add_reference(
    state: Accumulation,
    entries: Entries,
    raw: tuple[Tensor, Tensor],
    masked: tuple[Tensor, Tensor],
    w: Tensor,
    reverse: bool,
) -> None:
    """The sums of KL, with differences measured from the entry that both heads like best."""
    own = entries.tokens
    both = masked[0] + masked[1]
    state.near = entries.max(both, EMPTY)
    at_best = torch.where((both == state.near[own]) & (both > EMPTY), raw[0] - raw[1], -math.inf)
    found = entries.max(at_best, -math.inf)
    state.shift = torch.where(state.near > EMPTY, found, 0.0)
    state.m_ref = entries.max(masked[1], EMPTY)
    w_ref = torch.exp(masked[1] - state.m_ref[own])
    state.s_ref = entries.sum(w_ref)
    e = difference(*raw, state.shift[own], torch)
    state.a = entries.sum(times(w, e, torch))
    state.b = entries.sum(times(w, torch.expm1(-e), torch))
    state.a_ref = entries.sum(times(w_ref, e, torch)) if reverse else None
