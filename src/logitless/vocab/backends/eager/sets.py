"""The pass over sampling masks in plain torch: sums over segments, and each entry a token of its own with one entry."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....algebra.online_softmax import EMPTY, MASK, Accumulation, Totals, difference, times
from ....algebra.stats import Coefficients
from ...call.sampling_mask import Places, SamplingMask
from ..base import is_dense
from ..chunk import Chunk
from ..logits import flatness, of_tokens
from ..sets import Entries, Logits
from .formulas import logits_grad as of_slice


def look_at(mask: SamplingMask, rows: int, labels: Tensor | None, ignore_index: int) -> Places | None:
    """`SamplingMask.check_sets` of sets in which nothing is wrong, with no label that is ignored; waits once.

    None where that may not be so, or cannot be told at once, as here.
    """
    return None


def accumulate(
    sums: frozenset[str], label: Tensor | None, entries: Entries, logits: Logits
) -> tuple[Accumulation, Tensor | None]:
    """The online softmax of each token's entries but its label, and the sum of all its logits where that is wanted.

    label: (C,), the labels' logits.
    """
    (z, z_ref), own = logits, entries.tokens
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


def logits_grad(
    chunk: Chunk, entries: Entries, logits: Logits, totals: Totals, c: Coefficients, at_label: Tensor | None
) -> Tensor:
    """dL/d(hW) of every entry, (M,): the dense bases' share and the constant term, and at the label.

    c: as `Backend.logits_grad` takes coefficients; at_label: (C,), as `Backend.label_coefficient` has it.
    """
    own, policy = entries.tokens, chunk.policy
    c = {basis: policy.chain(x)[own] for basis, x in c.items()}
    dz = _dense_part(chunk, entries, logits, totals, c) if is_dense(chunk, c) else torch.zeros_like(logits[0])
    if "one" in c and policy.outer is None:
        dz += c["one"]
    if entries.labels_at is not None and at_label is not None:
        dz.index_add_(0, entries.labels_at, at_label)
    return dz


def _dense_part(chunk: Chunk, entries: Entries, logits: Logits, totals: Totals, c: Coefficients) -> Tensor:
    """The gradient formula, (M,); 0 at labels. c: of each entry's token."""
    own, outer = entries.tokens, chunk.policy.outer
    z, z_ref = (None if x is None else entries.without_labels(x)[:, None] for x in logits)
    assert z is not None
    flat = None if outer is None else flatness(z, of_tokens(outer, own))
    numbers = Totals(**{name: x[own] for name, x in totals.items()})
    found = of_slice(
        z, z_ref, None, flat, numbers, c, chunk.jsd_beta, lambda name, like: None, infinite=chunk.may_be_infinite
    )
    return found[:, 0]
