"""The methods of alignment: through the generated tokens (ste, gumbel), or by their score function (reinforce, ppo)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...losses import entropy_bonus, ppo_clip
from ...relax import Rollout
from ...relax.generate import parallel
from ...vocab.face import token_stats
from .legacy import GumbelLegacy, StraightThroughLegacy
from .method import Batch, Method, Outcome, Task

# Of ppo: passes over one sample, the clip of the ratio, weights of the value loss and of the entropy, and the discount
# and decay of generalised advantages.
EPOCHS, CLIP, VALUE, ENTROPY = 4, 0.2, 0.5, 0.01
GAMMA, LAMBDA = 0.99, 0.95


class Gumbel(Method):
    """Gradient of beta·KL - reward of soft tokens, through every generated token. GRADE: arXiv 2601.11574."""

    hard = False

    def backward(self, batch: Batch, tau: float, share: float = 1.0) -> Outcome:
        task = self.task
        policy, reference = task.readers()
        sampling = task.sampling(tau, task.config.carry, self.hard)
        rollout = task.generate(policy, batch, sampling, reference)
        rewards, kls = task.reward(rollout.soft, rollout.alive), rollout.kl.sum(-1)
        rollout.backward(share * (task.config.beta * kls - rewards).mean())
        return Outcome.of(rollout, rewards, kls)


class StraightThrough(Gumbel):
    """The same with one-hot tokens forward and the soft tokens' gradient. Bengio et al., arXiv 1308.3432."""

    hard = True


@dataclass(frozen=True, eq=False)
class Scored:
    """One pass over tokens that were sampled; all (B, T), 0 past the end."""

    hidden: Tensor  # (B, T, H), what each token was drawn from
    logprob: Tensor  # of the distribution that the tokens are drawn from: over the k best entries, or all
    kl: Tensor
    entropy: Tensor


def sample(task: Task, batch: Batch) -> Rollout:
    """Tokens of the policy as it now is, without gradient."""
    return task.generate(task.readers()[0], batch, task.sampling())


def score(task: Task, batch: Batch, rollout: Rollout, entropy: bool = False) -> Scored:
    """What the policy now makes of sampled tokens, with gradient."""
    policy, reference = task.readers()
    soft, alive = rollout.soft, rollout.alive
    ids = torch.cat([batch.prompts, soft.token[:, :-1]], 1)
    hidden = parallel(policy, policy.table[ids], batch.mask, alive.shape[1])
    with torch.no_grad():
        seen = parallel(reference, reference.table[ids], batch.mask, alive.shape[1])
    few = soft.ids.shape[-1] > 0
    want = ("kl", *(("entropy",) if entropy else ()), *(() if few else ("logprob",)))
    stats = token_stats(
        hidden,
        policy.head(),
        torch.where(alive, soft.token, -100),
        want=want,
        candidates=soft.ids if few else None,
        reference=(seen, reference.head()),
        memory_budget=task.config.memory_budget_bytes,
    )
    if few:
        chosen = (soft.ids == soft.token[..., None]).int().argmax(-1, keepdim=True)
        logp = stats.candidate_logits.log_softmax(-1).gather(-1, chosen)[..., 0]
    else:
        logp = stats.logprob
    logp = torch.where(alive, logp, 0.0)
    return Scored(hidden, logp, stats.kl, stats.entropy if entropy else torch.zeros_like(logp))


class Reinforce(Method):
    """Gradient of the same objective by the score function, less a moving average of what was gained before.

    Dense equivalent: `((baseline - (reward - beta * kl).detach()) * logp.sum(-1) + beta * kl).mean().backward()`.
    Without bias, for the distribution that is sampled from: the average is of other samples, the validation prompts'
    at first. Williams, 1992, doi:10.1007/BF00992696.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.baseline = math.nan  # the moving average of rewards less KL; NaN before anything is learned

    def backward(self, batch: Batch, tau: float, share: float = 1.0) -> Outcome:
        task, beta = self.task, self.task.config.beta
        rollout = sample(task, batch)
        scored = score(task, batch, rollout)
        kls = scored.kl.sum(-1)
        rewards = task.reward(rollout.soft, rollout.alive)
        advantage = rewards - beta * kls.detach() - self.baseline
        (share * (beta * kls - advantage * scored.logprob.sum(-1)).mean()).backward()
        return Outcome.of(rollout, rewards, kls)

    def learn(self, reward: float, kl: float) -> None:
        decay, gain = self.task.config.baseline_decay, reward - self.task.config.beta * kl
        self.baseline = gain if math.isnan(self.baseline) else decay * self.baseline + (1 - decay) * gain

    def state(self) -> dict[str, Any]:
        return {"baseline": self.baseline}

    def load(self, state: dict[str, Any]) -> None:
        self.baseline = state["baseline"]


@dataclass(frozen=True, eq=False)
class Collected:
    """A batch of sampled tokens with what the policy made of them then; constants, (B, T)."""

    batch: Batch
    rollout: Rollout
    logprob: Tensor
    advantages: Tensor
    returns: Tensor


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
    td_error = torch.where(alive, rewards + GAMMA * after - values, 0.0)
    found, carry = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        carry = td_error[:, t] + GAMMA * LAMBDA * carry
        found[:, t] = carry
    return torch.where(alive, found, 0.0)


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


METHODS: dict[str, type[Method]] = {
    "ste": StraightThrough,
    "gumbel": Gumbel,
    "reinforce": Reinforce,
    "ppo": PPO,
    "gumbel_legacy": GumbelLegacy,
    "ste_legacy": StraightThroughLegacy,
}


def method_of(task: Task) -> Method:
    """The configured method, for a new run."""
    return METHODS[task.config.method](task)
