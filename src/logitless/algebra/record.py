"""What follows exactly from the numbers that a record keeps of each token: one definition for torch and JAX."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from ..errors import OptionError, ShapeError
from .options import whole
from .stats import from_uniform

Array = Any


class Derived:
    """Probabilities of a record's fields; `xp` is the array namespace (`torch` or `jax.numpy`)."""

    xp: ClassVar[Any]
    token: Array
    token_logit: Array
    topk_logits: Array
    topk_ids: Array
    logsumexp: Array
    mean_logit: Array
    temperature: Array
    logsumexp_at_temperature: Array
    log_kept_mass: Array
    vocab_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.token.shape)

    @property
    def keep(self) -> int:
        """k, the number of best entries that are kept."""
        return self.topk_ids.shape[-1]

    def lead(self, *sizes: Any) -> tuple[int, ...]:
        """The shape (...) that `reshape` asks for, in numbers or in a tuple of them. Raises ShapeError."""
        given = sizes[0] if len(sizes) == 1 and whole(sizes[0]) is None else sizes
        found, tokens = sizes_of("record.reshape", given, -1), math.prod(self.shape)
        known, unknown = math.prod(size for size in found if size >= 0), found.count(-1)
        rest = tokens // known if known and unknown else 1
        if known * rest != tokens or unknown > min(known, 1):  # of a size beside 0 nobody could say what it is
            raise ShapeError(f"record.reshape: expected sizes of {tokens} tokens, one of them -1 at most, got {found}")
        return tuple(rest if size < 0 else size for size in found)

    def check_part(self, part: Derived) -> None:
        """Raise OptionError for a part that is not of this record's kind, whose entries `write` would spread."""
        for name in ("keep", "vocab_size"):
            ours, theirs = getattr(self, name), getattr(part, name)
            if ours != theirs:
                raise OptionError(f"record.write: expected a part with {name}={ours}, the record's, got {theirs}")

    def place(self, index: Any, x: Array) -> Any:
        """An index of (...) as one of a field x, (...) or (..., k): an `...` in it stands for none of the k entries."""
        parts = tuple(index) if isinstance(index, tuple | list) else (index,)
        if not any(part is ... for part in parts):
            return index
        return (*parts, *[slice(None)] * (x.ndim - self.token.ndim))

    @property
    def logprob(self) -> Array:
        """The token's raw log-prob, (...), right to the rounding of the two fields: 1e-7 of the larger one in fp32.

        Logits that share a large offset so leave it fewer digits than `token_stats` has, which never adds them up.
        """
        return self.token_logit - self.logsumexp

    @property
    def behaviour_logprob(self) -> Array:
        """The token's log-prob in the distribution that was drawn from, (...): an importance ratio's denominator.

        At most 0, and right to the rounding of logit / temperature: 2e-7 of it in fp32.
        """
        xp, greedy = self.xp, self.temperature == 0
        x = self.token_logit / xp.where(greedy, xp.ones_like(self.temperature), self.temperature)
        x = xp.clip(x - self.logsumexp_at_temperature - self.log_kept_mass, None, 0)
        return xp.where(greedy, xp.zeros_like(x), x)

    @property
    def topk_logprob(self) -> Array:
        """The best entries' raw log-probs, (..., k)."""
        return self.topk_logits - self.logsumexp[..., None]

    @property
    def self_certainty(self) -> Array:
        """KL(uniform‖p) of the raw distribution, (...)."""
        return from_uniform(self.logsumexp - self.mean_logit - math.log(self.vocab_size), self.logsumexp)

    @property
    def tail_mass(self) -> Array:
        """The raw probability of everything that is not among the k best, (...)."""
        xp, best = self.xp, self.topk_logprob
        if self.keep == self.vocab_size:
            return xp.zeros_like(self.logsumexp)
        if self.keep == 0:
            return xp.ones_like(self.logsumexp)
        # by the log of their share: 1 - p loses the digits of a small tail
        share = best[..., 0] + xp.log1p(xp.exp(best[..., 1:] - best[..., :1]).sum(-1))
        return abs(xp.expm1(xp.clip(share, None, 0)))  # not -, of whose 0 JSON makes -0.0

    @property
    def perplexity(self) -> Array:
        """exp of the mean -logprob over the last dimension's written tokens, (B,); 1 where there is none."""
        written = self.token >= 0
        total = self.xp.where(written, self.logprob, self.xp.zeros_like(self.logprob)).sum(-1)
        return self.xp.exp(-total / self.xp.clip(written.sum(-1), 1, None))


def sizes_of(name: str, shape: Any, least: int = 0) -> tuple[int, ...]:
    """The sizes of a shape as numbers of Python's, or a ShapeError where one is none, or less than `least`."""
    try:
        found = [whole(size) for size in shape]
    except TypeError:  # of what holds none
        found = [None]
    sizes = tuple(size for size in found if size is not None and size >= least)
    if len(sizes) < len(found):
        raise ShapeError(f"{name}: expected whole numbers of at least {least} in a tuple, got {shape!r}")
    return sizes
