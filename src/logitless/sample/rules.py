"""top-k, top-p and min-p over tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..algebra import rules

BIN_SHIFT = 14  # leaves sign, exponent and 9 bits of fp32


class Rules(rules.Rules):
    """`algebra.rules.Rules` of tensors, shares added up in float64."""

    def prefix(self, x: Tensor, logsumexp: Tensor) -> Tensor:
        """How many of the sorted scaled logits x (n, R) are kept, (n,); `logsumexp` (n,) is of the whole row."""
        return self.kept_of(x, logsumexp, torch, torch.float64)

    def mask(self, x: Tensor, logsumexp: Tensor) -> Tensor:
        """Which entries of a whole row of scaled logits x (V,), at most 0, are kept: `prefix`, without a sort.

        Only a top_k sorts. Shares are summed by bins of equal leading bits of x; the bin that holds the end is sorted.
        """
        kept = x > -math.inf
        if self.top_k:
            values, order = x.sort(descending=True, stable=True)
            n_kept = self.prefix(values[None], logsumexp[None])
            return torch.zeros_like(kept).index_fill_(0, order[: int(n_kept)], True)
        if self.top_p < 1:
            kept &= _nucleus(x, (x - logsumexp).exp_().double(), self.top_p)
        if self.min_p:
            kept &= x >= x.amax() + math.log(self.min_p)
        return kept


def _nucleus(x: Tensor, p: Tensor, share: float) -> Tensor:
    """The entries, best first, before which there is less than `share` of p."""
    bins = x.float().abs().view(torch.int32) >> BIN_SHIFT  # bits are in the order of their numbers
    total = torch.bincount(bins, weights=p).cumsum_(0)
    last = int(torch.searchsorted(total, share).clamp(max=total.numel() - 1))
    inside = (bins == last).nonzero().squeeze(1)
    order = inside[x[inside].sort(descending=True, stable=True).indices]
    before = p[order].cumsum(0) - p[order] + (total[last - 1] if last else 0.0)
    return (bins < last).index_fill_(0, order[before < share], True)
