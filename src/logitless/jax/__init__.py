"""The pass in JAX: losses, statistics, tokens and top-k entries of a head, without its logits. Depends on jax alone.

Pure functions under jit, grad, vmap, while_loop and shard_map; one derivative, in reverse mode. Arrays have any sizes.
"""

from .head import LMHead
from .loss import linear_cross_entropy
from .sample import sample_tokens
from .sampling.noise import Noise
from .sampling.record import SampleRecord
from .stats import TokenStats, TopK, linear_topk, token_stats

__all__ = [
    "LMHead",
    "Noise",
    "SampleRecord",
    "TokenStats",
    "TopK",
    "linear_cross_entropy",
    "linear_topk",
    "sample_tokens",
    "token_stats",
]
