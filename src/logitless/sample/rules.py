"""top-k, top-p and min-p over tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..algebra import rules
from ..vocab.face import add_at, exp_

NOTHING = 0x7F80  # the bin of -inf, bf16 bits of infinity


class Kept(NamedTuple):
    """What the rules keep of a whole row."""

    entries: Tensor  # (V,) bool
    count: Tensor  # ()
    log_mass: Tensor  # () the log of their share


class Rules(rules.Rules):
    """`algebra.rules.Rules` of tensors, shares added up in float64."""

    def prefix(self, x: Tensor, logsumexp: Tensor) -> Tensor:
        """How many of the sorted scaled logits x (n, R) are kept, (n,); `logsumexp` (n,) is of the whole row."""
        return self.kept_of(x, logsumexp, torch, Tensor.double)

    def kept(self, x: Tensor, logsumexp: Tensor) -> Kept:
        """What is kept of a whole row of scaled logits x (V,), at most 0: `prefix`, without a sort.

        Only a top_k sorts. Shares are summed by bins, equal numbers in bf16; the bin that holds the end is sorted.
        """
        p = exp_(x - logsumexp)
        if self.top_k:
            values, order = x.sort(descending=True, stable=True)
            n_kept = self.prefix(values[None], logsumexp[None])
            entries = torch.zeros_like(x, dtype=torch.bool).index_fill_(0, order[: int(n_kept)], True)
            return Kept(entries, n_kept[0], p[order[: int(n_kept)]].sum().log())
        if not self.min_p:
            entries, mass = _nucleus(x, p, self.top_p)
            return Kept(entries, entries.count_nonzero(), mass.to(p.dtype).log())
        entries = self.near_best(x, x.amax())
        if self.top_p < 1:
            whole = (p * entries).sum(dtype=torch.float64) if self.min_p_first else 1.0
            entries &= _nucleus(x, p, self.top_p * whole)[0]
        return Kept(entries, entries.count_nonzero(), (p * entries).sum().log())


def _nucleus(x: Tensor, p: Tensor, share: float | Tensor) -> tuple[Tensor, Tensor]:
    """The entries, best first, before which there is less than `share` of p; and how much of it they have."""
    bins = x.abs().bfloat16().view(torch.int16)  # bits are in the order of their numbers
    shares = p.new_zeros(NOTHING + 1, dtype=torch.float64)
    total = add_at(shares, bins.long().clamp_(max=NOTHING), p.double()).cumsum_(0)
    last = int(torch.searchsorted(total, share).clamp(max=NOTHING))
    mask = torch.empty_like(bins)  # of numbers: comparisons that give booleans take six times as long
    inside = _where(torch.eq(bins, last, out=mask))
    order = inside[x[inside].sort(descending=True, stable=True).indices]
    q = p[order].double()
    begin = total[last - 1] if last else total.new_zeros(())
    first = (q.cumsum(0) - q + begin < share) & (x[order] > -math.inf)
    entries = torch.lt(bins, last, out=mask).to(torch.int8).view(torch.bool)
    return entries.index_fill_(0, order[first], True), begin + q[first].sum()


def _where(mask: Tensor) -> Tensor:
    """Which entries of a mask (V,) of int16 are set, where few are: four are looked at at once."""
    whole = mask.numel() // 4 * 4
    ids = mask[:whole].view(torch.int64).nonzero() * 4 + torch.arange(4, device=mask.device)
    ids = torch.cat([ids.flatten(), torch.arange(whole, mask.numel(), device=mask.device)])
    return ids[mask[ids] != 0]
