"""What follows exactly from the numbers that a record keeps of each token: one definition for torch and JAX."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from ..errors import OptionError
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
        return -xp.expm1(xp.clip(share, None, 0))

    @property
    def perplexity(self) -> Array:
        """exp of the mean -logprob over the last dimension's written tokens, (B,); 1 where there is none."""
        written = self.token >= 0
        total = self.xp.where(written, self.logprob, self.xp.zeros_like(self.logprob)).sum(-1)
        return self.xp.exp(-total / self.xp.clip(written.sum(-1), 1, None))
