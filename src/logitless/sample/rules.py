"""top-k, top-p and min-p: how far down the sorted entries a sampler goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ..errors import OptionError

RETAINED = 64  # entries per token in which most nuclei end
MOST_RETAINED = 1024
BIN_SHIFT = 14  # leaves sign, exponent and 9 bits of fp32


@dataclass(frozen=True)
class Rules:
    """Which entries may be drawn: a prefix of the entries sorted by logit, equal ones by id. At least one.

    top_k: that many, 0 is all. top_p: as long as those before have less than this share of what top_k left (Holtzman
    et al., arXiv 1904.09751). min_p: those with at least this share of the best one's probability (Nguyen et al.,
    arXiv 2407.01082). The order of transformers and vLLM: temperature, top_k, top_p, min_p.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise OptionError(f"top_k: expected a whole number, 0 for all entries, got {self.top_k!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise OptionError(f"top_p: expected a share in 0 < p ≤ 1, 1 for all entries, got {self.top_p!r}")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p: expected a share in 0..1, 0 for all entries, got {self.min_p!r}")

    @property
    def none(self) -> bool:
        """Whether every entry may be drawn."""
        return not self.top_k and self.top_p == 1 and not self.min_p

    def retained(self, keep: int, vocab_size: int) -> int:
        """How many of the best entries to hold: mostly the rules end, or the drawn token lies, among them."""
        return min(vocab_size, max(keep, min(self.top_k or RETAINED, MOST_RETAINED)))

    def prefix(self, x: Tensor, logsumexp: Tensor) -> Tensor:
        """How many of the sorted scaled logits x (n, R) are kept, (n,); `logsumexp` (n,) is of the whole row."""
        keep = x > -math.inf
        if self.top_k:
            keep[:, self.top_k :] = False
            logsumexp = x[:, : self.top_k].logsumexp(1)
        if self.top_p < 1:
            p = (x - logsumexp[:, None]).double().exp_()
            before = torch.zeros_like(p)
            torch.cumsum(p[:, :-1], 1, out=before[:, 1:])
            keep &= before < self.top_p
        if self.min_p:
            keep &= x >= x[:, :1] + math.log(self.min_p)
        return keep.sum(1)

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
            kept &= _nucleus(x, (x - logsumexp).double().exp_(), self.top_p)
        if self.min_p:
            kept &= x >= x.amax() + math.log(self.min_p)
        return kept

    def settled(self, n_kept: Tensor, retained: int, vocab_size: int) -> Tensor:
        """Whether `prefix` of the best `retained` entries is that of the whole row, (n,) bool."""
        if retained >= min(self.top_k or vocab_size, vocab_size):
            return torch.ones_like(n_kept, dtype=torch.bool)
        if self.top_k and self.top_p < 1:  # a share of a sum that reaches further
            return torch.zeros_like(n_kept, dtype=torch.bool)
        return n_kept < retained


def _nucleus(x: Tensor, p: Tensor, share: float) -> Tensor:
    """The entries, best first, before which there is less than `share` of p."""
    bins = x.float().abs().view(torch.int32) >> BIN_SHIFT  # bits are in the order of their numbers
    total = torch.bincount(bins, weights=p).cumsum_(0)
    last = int(torch.searchsorted(total, share).clamp(max=total.numel() - 1))
    inside = (bins == last).nonzero().squeeze(1)
    order = inside[x[inside].sort(descending=True, stable=True).indices]
    before = p[order].cumsum(0) - p[order] + (total[last - 1] if last else 0.0)
    return (bins < last).index_fill_(0, order[before < share], True)


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)
