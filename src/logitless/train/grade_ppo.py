"""Proximal policy optimisation on sampled tokens: a value head, generalised advantages, clipped steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..losses import entropy_bonus, ppo_clip
from ..relax import Rollout
from .grade_score import sample, score
from .grade_step import Batch, Method, Outcome, Task

EPOCHS, CLIP, VALUE, ENTROPY, GAMMA, LAMBDA = 4, 0.2, 0.5, 0.01, 0.99, 0.95


def advantages(
    rewards: Tensor,  # (B, T), after each token
    values: Tensor,  # (B, T), before each token
    alive: Tensor,  # (B, T) bool
) -> Tensor:  # (B, T)
    """Generalised advantages: arXiv 1506.02438. Past the end there is neither reward nor value.

    Dense equivalent: `A[t] = sum((GAMMA * LAMBDA)**i * (r[t+i] + GAMMA * v[t+i+1] - v[t+i]) for i in range(T - t))`.
    """
    values = torch.where(alive, values, 0.0)
    after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    surprise = torch.where(alive, rewards + GAMMA * after - values, 0.0)
    found, carry = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        carry = surprise[:, t] + GAMMA * LAMBDA * carry
        found[:, t] = carry
    return torch.where(alive, found, 0.0)


@dataclass(frozen=True, eq=False)
class Collected:
    """A batch of sampled tokens with what the policy made of them then; constants, (B, T)."""

    batch: Batch
    rollout: Rollout
    logprob: Tensor
    advantages: Tensor
    returns: Tensor


class PPO(Method):
    """EPOCHS clipped steps on one sample of tokens, with the exact KL in the loss. arXiv 1707.06347.

    Dense equivalent:

        value_loss = (v - (A + old_v)) ** 2
        loss = (ppo_clip(logp, old_logp, A) + VALUE * value_loss - ENTROPY * entropy + beta * kl).sum(-1).mean()

    with the advantages A of the reward, after the last token, and of -beta times the KL where each token leads.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        width = task.model.config.get_text_config().hidden_size
        self.value = nn.Linear(width, 1, device=task.model.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def backward(self, batch: Batch, tau: float, share: float = 1.0) -> Outcome:
        """The gradient of the first epoch."""
        collected, outcome = self.collect(batch)
        (share * self.loss(collected)).backward()
        return outcome

    def step(self, batches: Sequence[Batch], tau: float, apply: Callable[[], None]) -> list[Outcome]:
        collected, outcomes = zip(*(self.collect(batch) for batch in batches), strict=True)
        for _ in range(EPOCHS):
            for one in collected:
                (self.loss(one) / len(batches)).backward()
            apply()
        return list(outcomes)

    @torch.no_grad()
    def collect(self, batch: Batch) -> tuple[Collected, Outcome]:
        """Tokens of the policy as it now is."""
        task = self.task
        rollout = sample(task, batch)
        scored = score(task, batch, rollout)
        given, alive = task.reward(rollout.soft, rollout.alive), rollout.alive
        penalty = task.config.beta * scored.kl
        rewards = -torch.cat([penalty[:, 1:], torch.zeros_like(penalty[:, :1])], 1)
        rewards.scatter_add_(1, alive.sum(-1, keepdim=True) - 1, given[:, None].to(rewards.dtype))
        values = self._values(scored.hidden)
        found = advantages(rewards, values, alive)
        collected = Collected(batch, rollout, scored.logprob, found, found + values)
        return collected, Outcome.of(rollout, given, scored.kl.sum(-1))

    def loss(self, collected: Collected) -> Tensor:
        """A scalar, of the parameters as they now are."""
        alive = collected.rollout.alive
        scored = score(self.task, collected.batch, collected.rollout, entropy=True)
        error = (self._values(scored.hidden) - collected.returns).square()
        each = (
            ppo_clip(scored.logprob, collected.logprob, collected.advantages, CLIP, CLIP)
            + VALUE * error
            + entropy_bonus(scored.entropy, ENTROPY)
            + self.task.config.beta * scored.kl
        )
        return torch.where(alive, each, 0.0).sum(-1).mean()

    def _values(self, hidden: Tensor) -> Tensor:
        return self.value(hidden.to(self.value.weight.dtype))[..., 0]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.value.parameters())

    def state(self) -> dict[str, Any]:
        return self.value.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.value.load_state_dict(state)
