"""The same objective with every distribution kept whole: what the other methods are compared with, where it fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...algebra.costs import whole_rollout_bytes
from ...errors import OptionError
from ...relax.generate import Reader, Sampling, alive_until
from ...relax.terms import Terms
from ...resident import free_bytes
from ...units import format_bytes
from ...vocab.face import LMHead, gumbel
from .config import GradeConfig
from .method import Batch, Method, Outcome, Task

PROBE = 8  # positions


@dataclass(frozen=True, eq=False)
class WholeRollout:
    """What was generated: `weights` (B, T, V) of every token; `token`, `alive` and `kl` (B, T) as a `Rollout`'s."""

    weights: Tensor
    token: Tensor
    alive: Tensor
    kl: Tensor

    def embedding(self, table: Tensor) -> Tensor:
        """The soft tokens' rows (B, T, E) of a table (V, E)."""
        return self.weights.to(table.dtype) @ table[: self.weights.shape[-1]]

    def backward(self, loss: Tensor) -> None:
        """The gradient of a scalar of this rollout's tensors, into every parameter's `.grad`."""
        loss.backward()


def generate_whole(
    policy: Reader,
    prompts: Tensor,  # (B, P)
    mask: Tensor,  # (B, P)
    seeds: Tensor,  # (B,)
    sampling: Sampling,
    *,
    reference: Reader | None = None,
) -> WholeRollout:
    """`generate` with k=V as a widely copied implementation has it: T passes over whole prefixes, (B, T, V) tensors.

    The same tokens, KL and gradient as `generate(..., k=V)`, from the same noise, up to rounding: it is its own dense
    equivalent. Both models read the prefix anew for every token, without a cache, and the policy's T graphs are kept
    (never recomputed). The soft tokens, the policy's logits and the reference's are kept whole; the KL is taken of them
    at the end. Of `sampling`, k, carry, checkpoint and the sweeps' options are not looked at.
    Memory: `rollout_bytes`, which is a dozen tensors of (B, T, V) and the activations of T passes.
    """
    first, steps = policy.table[prompts], sampling.steps
    rows: list[Tensor] = []
    seen: list[Tensor] = []
    kept: list[tuple[Tensor, ...]] = []
    for t in range(steps):
        at = F.pad(mask, (0, t), value=1)
        z = _next_logits(policy, torch.cat([first, *rows], 1), at)
        noisy = z + gumbel(seeds, torch.full_like(seeds, t), slice(0, z.shape[1]))
        weights = (noisy / sampling.tau).softmax(-1)
        token = noisy.argmax(-1)
        if sampling.hard:
            weights = F.one_hot(token, z.shape[1]).to(z.dtype) - weights.detach() + weights
        rows.append((weights.to(policy.table.dtype) @ policy.table)[:, None])
        if reference is None:
            kept.append((weights, token))
            continue
        with torch.no_grad():
            z_ref = _next_logits(reference, torch.cat([reference.table[prompts], *seen], 1), at)
            seen.append((weights.to(reference.table.dtype) @ reference.table)[:, None])
        kept.append((weights, token, z, z_ref))
    weights, token, *logits = (torch.stack(x, 1) for x in zip(*kept, strict=True))
    alive = alive_until(token, sampling.end)
    kl = _kl(*logits) * alive if logits else torch.zeros(alive.shape, device=weights.device)
    return WholeRollout(weights, token, alive, kl)


def _next_logits(model: Reader, embeds: Tensor, mask: Tensor) -> Tensor:
    return whole_logits(model.body(embeds, mask, None)[0][:, -1], model.head())


def whole_logits(
    hidden: Tensor,  # (N, H)
    head: LMHead,
) -> Tensor:  # (N, V) fp32 or fp64
    """A head's logits as a model's own forward makes them: a product in the weight's dtype."""
    terms, own = Terms.of(hidden, head), head.weight.dtype
    parts = [x.to(own) if i < terms.n else x[: head.rows].to(own) for i, x in enumerate(terms.tensors)]
    return terms.holding(parts).logits().to(terms.xs[0].dtype)


def _kl(z: Tensor, z_ref: Tensor) -> Tensor:
    logp, logq = z.log_softmax(-1), z_ref.log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum(-1)


def rollout_bytes(policy: Reader, batch: int, prompt: int, steps: int) -> int:
    """The most bytes that `generate_whole` and its backward hold beside the weights, for prompts (batch, prompt).

    What a position's activations take is counted in two short passes, whose difference leaves the weights out.
    """
    few, many = (_kept_bytes(policy, n) for n in (PROBE, 2 * PROBE))
    return whole_rollout_bytes(
        batch, steps, policy.head().rows, prompt=prompt, position_bytes=max(0, many - few) // PROBE
    )


def _kept_bytes(policy: Reader, length: int) -> int:
    """Bytes that one pass over `length` positions keeps for its backward, with the weights that it reads."""
    sizes: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    embeds = policy.table[torch.zeros(1, length, dtype=torch.long)].detach().requires_grad_()
    mask = torch.ones(1, length, dtype=torch.long, device=embeds.device)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        alive = policy.body(embeds, mask, None)
    del alive  # until here, so that no storage's address came twice
    return sum(sizes.values())


class TooLargeError(OptionError):
    """A batch of whole distributions would not fit into free memory."""


class GumbelLegacy(Method):
    """`Gumbel` as a widely copied implementation has it: all of the vocabulary, T passes over whole prefixes.

    Raises TooLargeError where a batch would not fit into what is free.
    """

    hard = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        config = task.config
        need = rollout_bytes(task.readers()[0], config.batch_size, config.prompt_length, config.completion_length)
        free = free_bytes(task.model.device)
        if need > free:
            raise TooLargeError(
                f"--method {config.method}: a batch needs {format_bytes(need)}, {format_bytes(free)} are free; use "
                f"--method {config.method.removesuffix('_legacy')}, or a smaller --completion-length or --batch-size"
            )

    def backward(self, batch: Batch, tau: float, share: float = 1.0) -> Outcome:
        task = self.task
        policy, reference = task.readers()
        sampling = task.sampling(tau, hard=self.hard)
        rollout = generate_whole(policy, batch.prompts, batch.mask, batch.seeds, sampling, reference=reference)
        rewards = task.reward.of_rows(rollout.embedding(task.reward.table), rollout.alive)
        kls = rollout.kl.sum(-1)
        rollout.backward(share * (task.config.beta * kls - rewards).mean())
        return Outcome(rewards.tolist(), kls.tolist(), coverage=1.0)

    @classmethod
    def vocabulary_bytes(cls, config: GradeConfig, vocab_size: int) -> int:
        batch, steps = config.batch_size, config.completion_length
        return whole_rollout_bytes(batch, steps, vocab_size, prompt=0, position_bytes=0)


class StraightThroughLegacy(GumbelLegacy):
    """`StraightThrough` in the same way."""

    hard = True
