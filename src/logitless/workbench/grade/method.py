"""One batch of alignment through soft tokens: what the methods share, evaluation, and their gradients' variance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from ...integrations.transformers.soft_tokens import reader_of
from ...relax import Reader, Rollout, Sampling, generate
from ...resident import peak_of
from .config import GradeConfig
from .models import Reward

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
    reward: Reward
    vocab_size: int
    end: int | None  # the id after which a completion is finished; None: none is

    def readers(self) -> tuple[Reader, Reader]:
        """Policy and reference, as the parameters now stand."""
        policy = reader_of(self.model, self.vocab_size)
        if self.frozen is None:
            return policy, reader_of(self.model, self.vocab_size, without_adapters=True)
        return policy, reader_of(self.frozen, self.vocab_size)

    def generate(self, policy: Reader, batch: Batch, sampling: Sampling, reference: Reader | None = None) -> Rollout:
        """What the policy continues a batch with, which the reward can read."""
        tables = () if sampling.k else (self.reward.table,)
        return generate(policy, batch.prompts, batch.mask, batch.seeds, sampling, reference=reference, tables=tables)

    def sampling(self, tau: float = 1.0, carry: str = PLAIN, hard: bool = True) -> Sampling:
        config = self.config
        return Sampling(
            config.completion_length,
            tau,
            config.top_k,
            hard=hard,
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

    @classmethod
    def of(cls, rollout: Rollout, rewards: Tensor, kls: Tensor) -> Outcome:
        """rewards, kls: (B,)."""
        coverage = rollout.soft.coverage[rollout.alive].mean()
        return cls(rewards.tolist(), kls.tolist(), float(coverage))


class Method:
    """How batches become gradients, and what a method keeps from step to step: one instance for each run.

    A method implements `backward`. It overrides `step` where it moves the parameters more than once for what it
    sampled, and the rest where it has something to say there.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    def backward(self, batch: Batch, tau: float, share: float = 1.0) -> Outcome:
        """Adds `share` of a batch's gradient of beta·KL - reward to every parameter's `.grad`."""
        raise NotImplementedError

    def step(self, batches: Sequence[Batch], tau: float, apply: Callable[[], None]) -> list[Outcome]:
        """Takes one optimizer step: `apply` clips the gradients, moves the parameters and clears the gradients."""
        outcomes = [self.backward(batch, tau, 1 / len(batches)) for batch in batches]
        apply()
        self.learn(fmean(x for one in outcomes for x in one.rewards), fmean(x for one in outcomes for x in one.kls))
        return outcomes

    def learn(self, reward: float, kl: float) -> None:
        """What a method makes of a mean reward and KL: of the validation prompts at first, then of each step."""

    def parameters(self) -> list[nn.Parameter]:
        """What is learned beside the policy."""
        return []

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the policy and the optimizer."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""

    @classmethod
    def vocabulary_bytes(cls, config: GradeConfig, vocab_size: int) -> int:
        """What one batch keeps that grows with completion length times vocabulary."""
        return 0


@torch.no_grad()
def evaluate(task: Task, batches: Iterable[Batch]) -> dict[str, float]:
    """Reward of sampled tokens, one-hot for every method, with its standard deviation; KL and coverage."""
    outcomes = []
    policy, reference = task.readers()
    for batch in batches:
        rollout = task.generate(policy, batch, task.sampling(), reference)
        outcomes.append(Outcome.of(rollout, task.reward(rollout.soft, rollout.alive), rollout.kl.sum(-1)))
    rewards = [x for outcome in outcomes for x in outcome.rewards]
    return {
        "reward_mean": fmean(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "kl": fmean(x for outcome in outcomes for x in outcome.kls),
        "coverage": fmean((x.coverage for x in outcomes), [len(x.rewards) for x in outcomes]),
        "samples": len(rewards),
    }


def memory_bytes(method: Method, batch: Batch, tau: float) -> int:
    """The most bytes that one batch's gradient takes at once, beside weights, gradients and optimizer state.

    Counted from what operators allocate, not from the process: generation, KL, reward and backward of this method
    alone. The policy's gradients are left empty.
    """
    model = method.task.model
    method.backward(batch, tau)  # gradients are there then, and what is made once
    used = peak_of(lambda: method.backward(batch, tau), model.device)
    for p in (*model.parameters(), *method.parameters()):
        p.grad = None
    return used


def gradient_variance(method: Method, batch: Batch, tau: float, samples: int) -> dict[str, float]:
    """How the gradient of one batch varies over `samples` draws of the noise, the parameters as they are.

    Dense equivalent, of the gradients G (samples, parameters): `G.var(0).sum()`, and `G.mean(0).square().sum()`.
    (The spread of one gradient across parameter tensors, which a widely copied implementation logs, is neither.)
    variance: the trace of the covariance; mean_square: of the mean gradient, less the variance that it still has.
    Of the policy's parameters, whose gradients it leaves empty. Memory: two gradients.
    """
    model = method.task.model
    leaves = [p for p in model.parameters() if p.requires_grad]
    kept = [torch.zeros_like(p, dtype=torch.float64) for p in leaves]
    squares = 0.0
    for i in range(samples):
        model.zero_grad(set_to_none=True)
        method.backward(replace(batch, seeds=batch.seeds + 7919 * (i + 1)), tau)
        for total, p in zip(kept, leaves, strict=True):
            if p.grad is not None:
                total += p.grad
                squares += float(p.grad.double().square().sum())
    for p in (*leaves, *method.parameters()):
        p.grad = None
    mean = sum(float((x / samples).square().sum()) for x in kept)
    variance = max((squares - samples * mean) / (samples - 1), 0.0) if samples > 1 else math.nan
    return {"variance": variance, "mean_square": max(0.0, mean - variance / samples), "samples": samples}
