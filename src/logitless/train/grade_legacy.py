"""The same objective with every distribution kept whole: what the other methods are compared with, where it fits."""

from __future__ import annotations

from ..algebra.costs import whole_rollout_bytes
from ..errors import OptionError
from ..memory.resident import free_bytes
from ..memory.units import format_bytes
from ..relax.legacy import generate_whole, rollout_bytes
from .grade_config import GradeConfig
from .grade_step import Batch, Method, Outcome, Task


class GumbelLegacy(Method):
    """`Gumbel` as a widely copied implementation has it: all of the vocabulary, T passes over whole prefixes.

    Raises OptionError where a batch would not fit into what is free.
    """

    hard = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        config = task.config
        need = rollout_bytes(task.readers()[0], config.batch_size, config.prompt_length, config.completion_length)
        free = free_bytes(task.model.device)
        if need > free:
            raise OptionError(
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
