"""top-k, top-p and min-p: how far down the sorted entries a sampler goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from ..errors import OptionError
from .options import whole

Array = Any
Order = Literal["transformers", "vllm"]
RETAINED = 64  # entries per token in which most nuclei end
MOST_RETAINED = 1024
COLDEST = 1e-24  # the lowest temperature: logits down to -5e5, divided by it, stay above what stands for no entry
HOTTEST = 1e26  # the highest: what stands for -inf, divided by it, is still impossible
TEMPERATURES = f"{COLDEST:g}..{HOTTEST:g}"


def is_temperature(value: Any) -> bool:
    """Whether it is a number that logits may be divided by."""
    if not _is_number(value):
        return False
    narrow = type(value).__name__ == "float16"  # NumPy's, which would make the ends 0 and inf
    return COLDEST <= (float(value) if narrow else value) <= HOTTEST


def is_drawing_temperature(value: Any) -> bool:
    """Or 0, at which the best entry is taken."""
    return is_temperature(value) or (_is_number(value) and value == 0)


def are_temperatures(values: Array) -> Array:
    """The same of each number of an array of float32 or more: in float16 the ends are 0 and inf."""
    return (values >= COLDEST) & (values <= HOTTEST)


@dataclass(frozen=True)
class Rules:
    """Which entries may be drawn: a prefix of the entries sorted by logit, equal ones by id. At least one.

    top_k: that many, 0 is all. top_p: as long as those before have less than this share (Holtzman et al., arXiv
    1904.09751). min_p: those with at least this share of the best one's probability (Nguyen et al., arXiv 2407.01082).
    order: all come after the temperature, in the order top_k, top_p, min_p of transformers or min_p, top_k, top_p of
    vLLM. Each keeps a prefix, so that all it decides is what top_p's share is of: what top_k left, or it and min_p.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    order: Order = "transformers"

    def __post_init__(self) -> None:
        top_k = whole(self.top_k)
        if top_k is None or top_k < 0:
            raise OptionError(f"top_k: expected a whole number, 0 for all entries, got {self.top_k!r}")
        if not _is_number(self.top_p) or not (0 < self.top_p <= 1 and float(self.top_p)):
            raise OptionError(f"top_p: expected a share in 0 < p ≤ 1, 1 for all entries, got {self.top_p!r}")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p: expected a share in 0..1, 0 for all entries, got {self.min_p!r}")
        if self.order not in get_args(Order):
            raise OptionError(f"order: expected {' or '.join(map(repr, get_args(Order)))}, got {self.order!r}")
        # Python's own numbers, which compile nothing anew and read the same on every rank
        for name, number in (("top_k", top_k), ("top_p", float(self.top_p)), ("min_p", float(self.min_p))):
            object.__setattr__(self, name, number)

    @property
    def none(self) -> bool:
        """Whether every entry may be drawn."""
        return not self.top_k and self.top_p == 1 and not self.min_p

    @property
    def min_p_first(self) -> bool:
        """Whether top_p's share is of what min_p left."""
        return self.order == "vllm" and self.min_p > 0

    def retained(self, keep: int, vocab_size: int) -> int:
        """How many of the best entries to hold: mostly the rules end, or the drawn token lies, among them."""
        return min(vocab_size, max(keep, min(self.top_k or RETAINED, MOST_RETAINED)))

    def kept_of(self, x: Array, logsumexp: Array, xp: Any, widened: Callable[[Array], Array] = lambda x: x) -> Array:
        """How many of the sorted scaled logits x (n, R) are kept, (n,); `logsumexp` (n,) is of the whole row.

        xp: the array namespace; widened: turns an array into the dtype in which shares are added up.
        """
        keep = self._before_top_p(x, xp)
        if self.top_p < 1:
            if self.top_k or self.min_p_first:
                best = x[:, :1]
                logsumexp = best[:, 0] + xp.log(xp.where(keep, xp.exp(x - best), 0.0).sum(1))
            p = xp.exp(widened(x - logsumexp[:, None]))
            keep = keep & (xp.cumsum(p, 1) - p < self.top_p)
        if self.min_p:
            keep = keep & self.near_best(x, x[:, :1])
        return keep.sum(1)

    def always_decided(self, retained: int, vocab_size: int) -> bool:
        """Whether `kept_of` so many best entries is that of whole rows, whatever the logits are."""
        return retained >= min(self.top_k or vocab_size, vocab_size)

    def decided(self, x: Array, n_kept: Array, vocab_size: int, xp: Any) -> Array:
        """Whether `kept_of` x, the best entries of each row, is that of whole rows, (n,) bool."""
        retained = x.shape[1]
        if self.always_decided(retained, vocab_size):
            return n_kept >= 0
        if self.top_p < 1 and (self.top_k or self.min_p_first):  # a share of a sum that may reach further
            return self._before_top_p(x, xp).sum(1) < retained
        return n_kept < retained

    def near_best(self, x: Array, best: Array) -> Array:
        """Which scaled logits min_p leaves."""
        return x >= best + math.log(self.min_p)

    def _before_top_p(self, x: Array, xp: Any) -> Array:
        """Which of the sorted scaled logits top_p takes its share of."""
        keep = x > -math.inf
        if self.top_k:  # of any size, which integers of arrays are not
            keep = keep & (xp.cumsum(keep, 1) <= min(self.top_k, x.shape[1]))
        if self.min_p_first:
            keep = keep & self.near_best(x, x[:, :1])
        return keep


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)
