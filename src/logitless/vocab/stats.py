"""`TokenStats`: the numbers that one pass gives."""

from __future__ import annotations

from torch import Tensor

from ..algebra.options import BY_REQUEST
from ..algebra.stats import STATISTICS


class TokenStats:
    """Per-token statistics of a head's distribution, as attributes; only those that were asked for exist.

    Floating ones are fp32 (fp64 for fp64 inputs) of the labels' shape (...); `rank` and `top_k_ids` int64;
    `top_k_ids`, `top_k_logits` (..., k), best first; `candidate_logits` (..., K). In nats.
    Ignored tokens hold 0 (`top_k_ids` -1). Raises AttributeError for a statistic that was not asked for.
    """

    logprob: Tensor
    logsumexp: Tensor
    label_logit: Tensor
    entropy: Tensor
    self_certainty: Tensor
    mean_logit: Tensor
    max_logit: Tensor
    rank: Tensor
    sum_sq_prob: Tensor
    el2n: Tensor
    kl: Tensor
    reverse_kl: Tensor
    reverse_kl_shared: Tensor
    jsd: Tensor
    kl_mixture: Tensor
    reverse_kl_mixture: Tensor
    acceptance: Tensor
    total_variation: Tensor
    tail_logprob: Tensor
    top_k_ids: Tensor
    top_k_logits: Tensor
    candidate_logits: Tensor

    def __init__(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Tensor:
        if name in STATISTICS:
            raise AttributeError(f"TokenStats: {name} was not computed; add {name!r} to want")
        if name in TokenStats.__annotations__:
            raise AttributeError(f"TokenStats: {name} was not computed; pass {BY_REQUEST[name]} to get it")
        raise AttributeError(f"TokenStats has no attribute {name!r}; statistics are {', '.join(STATISTICS)}")

    def __repr__(self) -> str:
        return f"TokenStats({', '.join(f'{k}={tuple(v.shape)}' for k, v in vars(self).items())})"
