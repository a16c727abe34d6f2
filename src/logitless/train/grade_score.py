"""Gradients by the score function, of tokens that were sampled before: REINFORCE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ..relax import Rollout, generate
from ..relax.generate import parallel, read
from ..vocab.api import token_stats
from .grade_step import Batch, Method, Outcome, Task


@dataclass(frozen=True, eq=False)
class Scored:
    """One pass over tokens that were sampled; all (B, T), 0 past the end."""

    hidden: Tensor  # (B, T, H), what each token was drawn from
    logprob: Tensor  # of the distribution over the k best entries, which the tokens are drawn from
    kl: Tensor
    entropy: Tensor


def sample(task: Task, batch: Batch) -> Rollout:
    """Tokens of the policy as it now is, without gradient."""
    return generate(task.readers()[0], batch.prompts, batch.mask, batch.seeds, task.sampling())


def score(task: Task, batch: Batch, rollout: Rollout, entropy: bool = False) -> Scored:
    """What the policy now makes of sampled tokens, with gradient."""
    policy, reference = task.readers()
    soft, alive = rollout.soft, rollout.alive
    embeds = policy.table[torch.cat([batch.prompts, soft.token[:, :-1]], 1)]
    hidden = parallel(policy, embeds, batch.mask, alive.shape[1])
    seen = read(reference, batch.prompts, batch.mask, soft, at_once=True)
    stats = token_stats(
        hidden, policy.head(), torch.where(alive, 0, -100), want=("kl", "entropy") if entropy else ("kl",),
        candidates=soft.ids, reference=(seen, reference.head()), memory_budget=task.config.memory_budget_bytes,
    )  # fmt: skip
    chosen = (soft.ids == soft.token[..., None]).int().argmax(-1, keepdim=True)
    logp = torch.where(alive, stats.candidate_logits.log_softmax(-1).gather(-1, chosen)[..., 0], 0.0)
    return Scored(hidden, logp, stats.kl, stats.entropy if entropy else torch.zeros_like(logp))


class Reinforce(Method):
    """Gradient of the same objective by the score function, less a moving average of what was gained before.

    Dense equivalent: `((baseline - (reward - beta * kl).detach()) * logp.sum(-1) + beta * kl).mean().backward()`.
    Without bias, for the distribution that is sampled from. Williams, 1992, doi:10.1007/BF00992696.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.baseline: float | None = None  # the moving average of rewards less KL

    def backward(self, batch: Batch, tau: float, share: float = 1.0) -> Outcome:
        task, beta = self.task, self.task.config.beta
        rollout = sample(task, batch)
        scored = score(task, batch, rollout)
        kls = scored.kl.sum(-1)
        rewards = task.reward(rollout.soft, rollout.alive)
        advantage = rewards - beta * kls.detach() - (self.baseline or 0.0)
        (share * (beta * kls - advantage * scored.logprob.sum(-1)).mean()).backward()
        return Outcome.of(rollout, rewards, kls)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        config = self.task.config
        gain = fmean(r - config.beta * k for o in outcomes for r, k in zip(o.rewards, o.kls, strict=True))
        decay = config.baseline_decay
        self.baseline = gain if self.baseline is None else decay * self.baseline + (1 - decay) * gain

    def state(self) -> dict[str, Any]:
        return {"baseline": self.baseline}

    def load(self, state: dict[str, Any]) -> None:
        self.baseline = state["baseline"]
