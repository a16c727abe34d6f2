"""Differentiable tokens: top-k Gumbel-softmax, straight-through, and what alignment through them needs.

One step of a loop:

    noise = relax.Noise(seeds=sequence_seeds, positions=step)
    soft = relax.gumbel_topk(hidden, head, tau=relax.anneal(step, steps), k=256, hard=True, noise=noise)
    next_input = relax.soft_embedding(soft, embedding.weight)
    kl = relax.online_kl(hidden, head, (ref_hidden, ref_head), total=kl)
"""

from ..vocab.face import Noise, gumbel
from .expected import Expected, expected_embedding
from .generate import Reader, Rollout, Sampling, generate
from .kl import online_kl
from .schedule import anneal
from .tokens import SoftTokens, soft_embedding
from .topk import gumbel_topk

__all__ = [
    "Expected",
    "Noise",
    "Reader",
    "Rollout",
    "Sampling",
    "SoftTokens",
    "anneal",
    "expected_embedding",
    "generate",
    "gumbel",
    "gumbel_topk",
    "online_kl",
    "soft_embedding",
]
