"""top-k, top-p and min-p: how far down the sorted entries a sampler goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..errors import OptionError

Array = Any
RETAINED = 64  # entries per token in which most nuclei end
MOST_RETAINED = 1024


@dataclass(frozen=True)
class Rules:
    """Which entries may be drawn: a prefix of the entries sorted by logit, equal ones by id. At least one.

    top_k: that many, 0 is all. top_p: as long as those before have less than this share of what top_k left (Holtzman
    et al., arXiv 1904.09751). min_p: those with at least this share of the best one's probability (Nguyen et al.,
    arXiv 2407.01082). The order of transformers: temperature, top_k, top_p, min_p; vLLM applies min_p before top_k and
    top_p, whose share is then of what min_p left, so that it keeps the same entries or fewer.
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

    def kept_of(self, x: Array, logsumexp: Array, xp: Any, wide: Any) -> Array:
        """How many of the sorted scaled logits x (n, R) are kept, (n,); `logsumexp` (n,) is of the whole row.

        xp: the array namespace; wide: the dtype in which shares are added up.
        """
        keep = x > -math.inf
        if self.top_k:
            top_k = min(self.top_k, x.shape[1])  # of any size, which integers of arrays are not
            keep = keep & (xp.cumsum(keep, 1) <= top_k)
            best = x[:, :1]
            logsumexp = best[:, 0] + xp.log(xp.exp(x[:, :top_k] - best).sum(1))
        if self.top_p < 1:
            p = xp.exp(xp.asarray(x - logsumexp[:, None], dtype=wide))
            keep = keep & (xp.cumsum(p, 1) - p < self.top_p)
        if self.min_p:
            keep = keep & (x >= x[:, :1] + math.log(self.min_p))
        return keep.sum(1)

    def decided(self, n_kept: Array, retained: int, vocab_size: int) -> Array:
        """Whether `kept_of` the top `retained` entries is that of whole rows, (n,) bool."""
        if retained >= min(self.top_k or vocab_size, vocab_size):
            return n_kept >= 0
        if self.top_k and self.top_p < 1:  # a share of a sum that reaches further
            return n_kept < 0
        return n_kept < retained


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)
