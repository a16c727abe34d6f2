"""Losses as pure functions of per-token numbers: one loss per token (per pair for preferences).

loss_fn = lambda stats, old, adv: ll.losses.ppo_clip(stats.logprob, old, adv)
loss = ll.token_loss(loss_fn, hidden, head, labels, inputs=(old_logprob, advantages))
"""

from .distill import forward_kl, jsd, reverse_kl, soft_targets
from .policy import (
    cispo,
    dapo,
    dr_grpo,
    entropy_bonus,
    group_advantages,
    grpo,
    kl_exact,
    kl_k1,
    kl_k2,
    kl_k3,
    ppo_clip,
    reinforce,
    token_weights,
)
from .preference import dpo, ipo, kto, kto_baseline, orpo, sequence_logprob, simpo
from .supervised import dft, focal, label_smoothing, nll, z_loss

__all__ = [
    "cispo",
    "dapo",
    "dft",
    "dpo",
    "dr_grpo",
    "entropy_bonus",
    "focal",
    "forward_kl",
    "group_advantages",
    "grpo",
    "ipo",
    "jsd",
    "kl_exact",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kto",
    "kto_baseline",
    "label_smoothing",
    "nll",
    "orpo",
    "ppo_clip",
    "reinforce",
    "reverse_kl",
    "sequence_logprob",
    "simpo",
    "soft_targets",
    "token_weights",
    "z_loss",
]
