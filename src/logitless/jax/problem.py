"""One call of the pass, checked and flat: its options, its arrays, and its slices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
from jax import Array, lax

from ..algebra.costs import Slices, slices_of, tiles_of
from ..algebra.stats import sums_of
from .tiles import compute_dtype, operand_dtype, windows

COPY_COST = 3  # a copy of W's slices takes as long as passing over the logits of H / 3 tokens


@dataclass(frozen=True)
class Spec:
    """The options of a call that are known before tracing."""

    want: tuple[str, ...]
    temperature: float  # ignored where the call has one per token
    ignore_index: int
    top_k: int
    jsd_beta: float
    budget: int
    rows: int  # the vocabulary, on all devices
    scale: float
    softcap: float | None
    ref_scale: float
    ref_softcap: float | None
    axis: str | None  # the mesh axis that the vocabulary is sharded over
    forbidden: tuple[int, ...] = ()  # ids that do not exist

    @property
    def sums(self) -> frozenset[str]:
        return sums_of(self.want)

    @property
    def best(self) -> int:
        """How many of the best entries the fold keeps."""
        return max(self.top_k, int("argmax" in self.sums))

    @property
    def whole(self) -> bool:
        """Whether the statistics need a second look at whole rows."""
        return "jsd" in self.sums


class Tokens(NamedTuple):
    """What a call has for each token."""

    hidden: Array  # (N, H)
    labels: Array | None = None  # (N,)
    temperature: Array | None = None  # (N,)
    candidates: Array | None = None  # (N, K)
    ref_hidden: Array | None = None  # (N, H')


class Operands(NamedTuple):
    """The arrays of a call."""

    tokens: Tokens
    weight: Array  # (V, H): this device's rows
    bias: Array | None = None  # (V,)
    ref_weight: Array | None = None  # (V, H')
    ref_bias: Array | None = None  # (V,)


def local_rows(spec: Spec, x: Operands) -> int:
    """The rows of W that this device visits: what lies past the vocabulary on the last devices is masked."""
    return spec.rows if spec.axis is None else x.weight.shape[0]


def first_row(spec: Spec, x: Operands) -> Array | int:
    """The vocabulary id of this device's first row."""
    return 0 if spec.axis is None else lax.axis_index(spec.axis) * x.weight.shape[0]


def slices_for(spec: Spec, x: Operands, whole: bool) -> Slices:
    """The tokens and entries at a time."""
    hidden = x.tokens.hidden
    heads = [w for w in (x.weight, x.ref_weight) if w is not None]
    n, rows, itemsize = hidden.shape[0], local_rows(spec, x), compute_dtype(hidden).itemsize
    tiles = tiles_of(spec.want, softcap=bool(spec.softcap), top_k=spec.top_k)
    as_it_is = all(w.shape[0] == rows and w.dtype == operand_dtype(hidden, w) for w in heads)
    if as_it_is and n <= hidden.shape[1] // COPY_COST:
        size = itemsize * n * rows * (len(heads) + tiles)
        if size <= spec.budget:
            return Slices(n, rows, size)
    found = slices_of(
        n,
        rows,
        budget=spec.budget,
        device="cpu" if jax.default_backend() == "cpu" else "gpu",
        itemsize=itemsize,
        heads=len(heads),
        tiles=tiles,
        converted=sum(w.shape[1] for w in heads),  # XLA copies a slice of W before it multiplies
        whole=whole,
    )
    even = -(-rows // windows(found.width, rows))  # the last slice is moved back: what it shares is computed twice
    return replace(found, width=even)
