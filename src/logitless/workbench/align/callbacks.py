"""What happens beside the steps of an alignment run: memory metrics, held-out rows, progress."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...resident import peak_bytes
from ...units import format_bytes
from ..common.files import append_line
from ..runs.callbacks import Records, check_finite
from ..runs.progress import ProgressBar

PREPARATION = "eval_model_preparation_time"  # which Trainer tells where nothing was trained before


class MemoryMetrics(TrainerCallback):
    """Adds memory/peak_bytes and memory/dense_would_need_bytes to each step's logs; comes before those that log."""

    def __init__(self, dense_bytes: Callable[[int], int], longest: int) -> None:
        self.dense_bytes, self.longest = dense_bytes, longest

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if logs is not None and "loss" in logs:
            logs["memory/peak_bytes"] = peak_bytes(args.device)
            longest = int(logs.get("completions/max_length", self.longest))
            logs["memory/dense_would_need_bytes"] = self.dense_bytes(longest)


class HeldOutRows(TrainerCallback):
    """The trainer's own evaluation of the held-out rows before the first step; `AfterLastStep`: after the last."""

    def __init__(self, evaluate: Callable[[], dict[str, float]], records: Records) -> None:
        self.evaluate, self.path = evaluate, records.path
        self.measured = any(record["step"] == 0 for record in records.before)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == 0 and not self.measured:
            self._record(args, {"step": 0})

    def conclude(self, args: TrainingArguments, step: int, model: Any = None) -> None:
        """Measures and records what the trained policy does."""
        self._record(args, {"step": step, "final": True})

    def _record(self, args: TrainingArguments, record: dict[str, Any]) -> None:
        with unchanged_random_numbers():  # a resumed run does not measure again what it measured before
            found = self.evaluate()
        if args.process_index == 0:
            measured = {k: v for k, v in found.items() if isinstance(v, int | float) and k != PREPARATION}
            held_out = {k.removeprefix("eval_"): v for k, v in measured.items()}
            append_line(self.path, {**record, "held_out": held_out})
        for name in ("loss", "reward"):
            value = found.get(f"eval_{name}")
            if value is not None:  # the reward where no row has one
                check_finite(f"of held-out rows the {name} is", value, record["step"])


@contextmanager
def unchanged_random_numbers() -> Iterator[None]:
    """Leaves the generators of Python, NumPy and torch, on all devices, as they were."""
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    numpy.random.set_state(arrays)


class AlignProgress(ProgressBar):
    """Reward (or accuracy), self-certainty, KL and speed of the step."""

    def line(self, latest: dict[str, Any]) -> str:
        named = (
            ("reward", "reward", "z.3f"),
            ("self-certainty", "self_certainty/mean", "z.3f"),
            ("KL", "kl", "z.4f"),
            ("accuracy", "rewards/accuracies", "z.2f"),
            ("margin", "rewards/margins", "z.3g"),
        )
        shown = [f"{name} {latest[key]:{form}}" for name, key, form in named if latest.get(key) is not None]
        return " · ".join([*shown, f"peak {format_bytes(latest['peak_memory_bytes'])}"])
