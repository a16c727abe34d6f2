"""Gradients through the generated tokens: straight-through, and Gumbel-softmax."""

from __future__ import annotations

from ..relax import generate
from .grade_step import Batch, Method, Outcome


class Gumbel(Method):
    """Gradient of beta·KL - reward of soft tokens, through every generated token. GRADE: arXiv 2601.11574."""

    hard = False

    def backward(self, batch: Batch, tau: float, share: float = 1.0) -> Outcome:
        task = self.task
        policy, reference = task.readers()
        sampling = task.sampling(tau, task.config.carry, self.hard)
        rollout = generate(policy, batch.prompts, batch.mask, batch.seeds, sampling, reference=reference)
        rewards, kls = task.reward(rollout.soft, rollout.alive), rollout.kl.sum(-1)
        rollout.backward(share * (task.config.beta * kls - rewards).mean())
        return Outcome.of(rollout, rewards, kls)


class StraightThrough(Gumbel):
    """The same with one-hot tokens forward and the soft tokens' gradient. Bengio et al., arXiv 1308.3432."""

    hard = True
