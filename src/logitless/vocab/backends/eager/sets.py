"""The gradient of entries that tokens have each of their own: each is a token of its own with one entry."""

from __future__ import annotations

import torch
from torch import Tensor

from ....algebra.online_softmax import Totals
from ....algebra.stats import Coefficients
from ..base import Chunk, is_dense
from ..logits import flatness, of_tokens
from ..sets import Entries
from .formulas import logits_grad


def sets_grad(
    chunk: Chunk,
    entries: Entries,
    logits: tuple[Tensor, Tensor | None],
    totals: Totals,
    coefficients: Coefficients,
    at_label: Tensor | None,
) -> Tensor:
    """`Backend.sets_grad` by the formulas of slices."""
    own, policy, z = entries.tokens, chunk.policy, logits[0]
    c = {basis: policy.chain(x)[own] for basis, x in coefficients.items()}
    dz = _dense_part(chunk, entries, logits, totals, c) if is_dense(chunk, coefficients) else torch.zeros_like(z)
    if "one" in c and policy.outer is None:
        dz += c["one"]
    if entries.labels_at is not None and at_label is not None:
        dz.index_add_(0, entries.labels_at, at_label)
    return dz


def _dense_part(
    chunk: Chunk, entries: Entries, logits: tuple[Tensor, Tensor | None], totals: Totals, c: Coefficients
) -> Tensor:
    """The gradient formula, (M,); 0 at labels. c: of each entry's token."""
    own, outer = entries.tokens, chunk.policy.outer
    z, z_ref = (None if x is None else entries.without_labels(x)[:, None] for x in logits)
    assert z is not None
    flat = None if outer is None else flatness(z, of_tokens(outer, own))
    numbers = Totals(**{name: x[own] for name, x in totals.items()})
    found = logits_grad(
        z, z_ref, None, flat, numbers, c, chunk.jsd_beta, lambda name, like: None, infinite=chunk.may_be_infinite
    )
    return found[:, 0]
