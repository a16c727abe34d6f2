"""One batch of alignment through soft tokens: losses, their gradients' variance, and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from ..relax import Reader, Rollout, Sampling, generate, soft_embedding
from ..relax.generate import parallel, read
from ..vocab.api import token_stats
from .grade_config import GradeConfig
from .grade_models import SoftReward, reader_of

PLAIN = "none"  # a rollout without gradient


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts, padded on the left, and each sequence's own noise."""

    prompts: Tensor  # (B, P)
    mask: Tensor  # (B, P)
    seeds: Tensor  # (B,)


@dataclass(frozen=True, eq=False)
class Task:
    """What every method shares: the policy, what it is compared with, what rewards it."""

    config: GradeConfig
    model: Any
    frozen: Any  # the reference; None: the policy without its adapters
    reward: SoftReward
    vocab_size: int
    end: int

    def readers(self) -> tuple[Reader, Reader]:
        """Policy and reference, as the parameters now stand."""
        policy = reader_of(self.model, self.vocab_size)
        if self.frozen is None:
            return policy, reader_of(self.model, self.vocab_size, without_adapters=True)
        return policy, reader_of(self.frozen, self.vocab_size)

    def sampling(self, tau: float, carry: str) -> Sampling:
        config = self.config
        return Sampling(
            config.completion_length,
            tau,
            config.top_k,
            hard=config.method != "gumbel" or carry == PLAIN,
            carry=carry,
            checkpoint=config.gradient_checkpointing,
            end=self.end,
            memory_budget=config.memory_budget_bytes,
        )


@dataclass(frozen=True)
class Outcome:
    """Per sequence: reward and KL (summed over steps); coverage over its steps."""

    rewards: list[float]
    kls: list[float]
    coverage: float


def backward_soft(task: Task, batch: Batch, tau: float, share: float) -> Outcome:
    """Gradient of -(reward - beta·KL), through every generated token. GRADE: arXiv 2601.11574."""
    policy, reference = task.readers()
    sampling = task.sampling(tau, task.config.carry)
    rollout = generate(policy, batch.prompts, batch.mask, batch.seeds, sampling, reference=reference)
    rewards, kls = task.reward(rollout.soft, rollout.alive), rollout.kl.sum(-1)
    rollout.backward(share * (task.config.beta * kls - rewards).mean())
    return _outcome(rollout, rewards, kls)


def backward_score(task: Task, batch: Batch, baseline: float, share: float) -> Outcome:
    """Gradient of the same objective by REINFORCE: sampled tokens, log-probs of the distribution over the k best.

    Dense equivalent: `((baseline - (reward - beta * kl).detach()) * logp.sum(-1) + beta * kl).mean().backward()`.
    Without bias, for the distribution that is sampled from. Williams, 1992, doi:10.1007/BF00992696.
    """
    policy, reference = task.readers()
    rollout = generate(policy, batch.prompts, batch.mask, batch.seeds, task.sampling(1.0, PLAIN))
    soft, alive = rollout.soft, rollout.alive
    rows = soft_embedding(soft, policy.table)[:, :-1].detach()
    embeds = torch.cat([policy.table[batch.prompts], rows], 1)
    hidden = parallel(policy, embeds, batch.mask, alive.shape[1])
    seen = read(reference, batch.prompts, batch.mask, soft, at_once=True)
    stats = token_stats(
        hidden, policy.head(), torch.where(alive, 0, -100), want=("kl",), candidates=soft.ids,
        reference=(seen, reference.head()), memory_budget=task.config.memory_budget_bytes,
    )  # fmt: skip
    chosen = (soft.ids == soft.token[..., None]).int().argmax(-1, keepdim=True)
    logp = torch.where(alive, stats.candidate_logits.log_softmax(-1).gather(-1, chosen)[..., 0], 0.0).sum(-1)
    kls, beta = stats.kl.sum(-1), task.config.beta
    rewards = task.reward(soft, alive)
    advantage = rewards - beta * kls.detach() - baseline
    (share * (beta * kls - advantage * logp).mean()).backward()
    return _outcome(rollout, rewards, kls)


def _outcome(rollout: Rollout, rewards: Tensor, kls: Tensor) -> Outcome:
    coverage = rollout.soft.coverage[rollout.alive].mean()
    return Outcome(rewards.tolist(), kls.tolist(), float(coverage))


def backward(task: Task, batch: Batch, tau: float, baseline: float, share: float = 1.0) -> Outcome:
    """Adds `share` of the batch's gradient to the parameters', by the configured method."""
    if task.config.method == "reinforce":
        return backward_score(task, batch, baseline, share)
    return backward_soft(task, batch, tau, share)


@torch.no_grad()
def evaluate(task: Task, batches: Iterable[Batch]) -> dict[str, float]:
    """Reward of sampled tokens, one-hot for every method, with its standard deviation; KL and coverage."""
    outcomes = []
    policy, reference = task.readers()
    for batch in batches:
        sampling = task.sampling(1.0, PLAIN)
        rollout = generate(policy, batch.prompts, batch.mask, batch.seeds, sampling, reference=reference)
        outcomes.append(_outcome(rollout, task.reward(rollout.soft, rollout.alive), rollout.kl.sum(-1)))
    rewards = [x for outcome in outcomes for x in outcome.rewards]
    return {
        "reward_mean": fmean(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "kl": fmean(x for outcome in outcomes for x in outcome.kls),
        "coverage": fmean(outcome.coverage for outcome in outcomes),
        "samples": len(rewards),
    }


def gradient_variance(task: Task, batch: Batch, tau: float, baseline: float, samples: int) -> dict[str, float]:
    """How the gradient of one batch varies over `samples` draws of the noise, the parameters as they are.

    Dense equivalent, of the gradients G (samples, parameters): `G.var(0).sum()`, and `G.mean(0).square().sum()`.
    (The spread of one gradient across parameter tensors, which a widely copied implementation logs, is neither.)
    variance: the trace of the covariance; mean_square: of the mean gradient, less the variance that it still has.
    Leaves the parameters' gradients empty. Memory: two gradients.
    """
    leaves = [p for p in task.model.parameters() if p.requires_grad]
    kept = [torch.zeros_like(p, dtype=torch.float64) for p in leaves]
    squares = 0.0
    for i in range(samples):
        task.model.zero_grad(set_to_none=True)
        backward(task, replace(batch, seeds=batch.seeds + 7919 * (i + 1)), tau, baseline)
        for total, p in zip(kept, leaves, strict=True):
            if p.grad is not None:
                total += p.grad
                squares += float(p.grad.double().square().sum())
    task.model.zero_grad(set_to_none=True)
    mean = sum(float((x / samples).square().sum()) for x in kept)
    variance = (squares - samples * mean) / (samples - 1) if samples > 1 else math.nan
    return {"variance": variance, "mean_square": max(0.0, mean - variance / samples), "samples": samples}
