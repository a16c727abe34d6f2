"""What a sparse backward leaves out of a chunk, decided by the mass of each token in each slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algebra.online_softmax import Totals
from ...algebra.stats import Coefficients
from ..head.sparse import BOUNDED, SparseBackward

MOSTLY = 0.9  # of a chunk's tokens, from which on a slice takes all of them: gathering costs more


@dataclass(frozen=True)
class SliceMass:
    """A slice's part of each token's sums, (C,) each, w = e^(z-m)."""

    m: Tensor
    w: Tensor  # Σw
    t: Tensor | None  # Σw·(z-m), where entropy is wanted


@dataclass
class Skip:
    """What a chunk's backward pass leaves out."""

    computed: Tensor  # (C, J), whether a token takes part in the products of a slice
    mass: Tensor  # (C,), what a token leaves out
    report: SparseBackward

    @classmethod
    def of(cls, slice_masses: list[SliceMass], totals: Totals, report: SparseBackward) -> Skip:
        """Of each token the slices of least mass, while their sum keeps to the bound."""
        mass = masses(slice_masses, totals)
        ordered, order = mass.sort(1)
        above = ~(ordered.cumsum(1) <= report.bound)  # NaN is computed
        computed = torch.zeros_like(above).scatter_(1, order, above)
        computed |= computed.sum(0) > MOSTLY * computed.shape[0]
        return cls(computed, mass.masked_fill_(computed, 0.0).sum(1), report)

    @classmethod
    def saved(cls, extra: dict[str, Tensor], report: SparseBackward | None) -> Skip | None:
        """From what `items` gave."""
        return None if report is None else cls(extra["computed_slices"], extra["skipped_mass"], report)

    def items(self) -> dict[str, Tensor]:
        """What has to wait for backward."""
        return {"computed_slices": self.computed, "skipped_mass": self.mass}

    def rows(self, slices: Sequence[slice], coefficients: Coefficients) -> list[Tensor | None]:
        """The tokens of each of the vocabulary's slices, None where all take part; and the report's part of these."""
        weight = torch.stack([coefficients[basis].abs() for basis in sorted(BOUNDED & coefficients.keys())]).sum(0)
        computed = (self.computed & (weight != 0)[:, None]).t().contiguous()
        counts = computed.sum(1).tolist()  # the one wait for the device
        pairs = sum(count * (v.stop - v.start) for count, v in zip(counts, slices, strict=True))
        n = self.mass.shape[0]
        self.report.add(self.mass, weight, pairs, n * slices[-1].stop)
        rows = torch.nonzero_static(computed.view(-1), size=sum(counts)).squeeze(1).remainder_(n).split(counts)
        return [None if x.shape[0] == n else x for x in rows]


def masses(slice_masses: list[SliceMass], totals: Totals) -> Tensor:
    """Each token's mass in each slice, (C, J): Σp, or Σ p·|log p| where that is asked for and more."""
    offset = torch.stack([x.m for x in slice_masses], 1)
    offset.sub_(totals.m[:, None]).sub_(totals.log_s[:, None])  # log p = (z - m) + offset
    w = torch.stack([x.w for x in slice_masses], 1)
    sharp = [x.t for x in slice_masses if x.t is not None]
    if sharp:
        torch.maximum(w, torch.stack(sharp, 1).addcmul_(w, offset).neg_(), out=w)
    return w.mul_(offset.exp_())
