"""What happens beside Trainer's steps: records, held-out loss, a stop that keeps its checkpoint, progress."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...errors import NotFiniteError
from ...resident import peak_bytes
from ..common.files import append_line, write_lines
from ..common.signals import STOPPING, leave_closed_terminal
from ..sources.packing import IGNORED, Collate, PackedRows, collate
from .checkpoints import begin_checkpoint, finish_checkpoint, records_at
from .ranks import first


class Records(TrainerCallback):
    """One line of metrics.jsonl per optimizer step, behind those of the checkpoint that a run resumes from."""

    def __init__(self, path: Path, tokens_per_step: int, checkpoint: Path | None, every_metric: bool = False) -> None:
        self.path, self.tokens_per_step, self.every_metric = path, tokens_per_step, every_metric
        self.before = records_at(checkpoint)
        self.seconds = self.before[-1].get("seconds", 0.0) if self.before else 0.0
        self.tokens = max((r.get("tokens", 0) for r in self.before), default=0)
        self.latest: dict[str, Any] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.rewrite(args)

    def rewrite(self, args: TrainingArguments) -> None:
        """Leaves the lines up to where the run resumes, for more to come behind them."""
        if args.process_index == 0:
            write_lines(self.path, self.before)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.started = time.perf_counter()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **_: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        took = time.perf_counter() - self.started
        self.seconds += took
        tokens = int(logs.get("num_tokens", state.global_step * self.tokens_per_step))  # TRL counts its own
        new, self.tokens = tokens - self.tokens, tokens
        self.latest = {
            "step": state.global_step,
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "tokens": tokens,
            "tokens_per_second": round(new / took, 1),
            "peak_memory_bytes": peak_bytes(args.device),
            "seconds": round(self.seconds, 3),
        }
        if self.every_metric:
            self.latest = {**{k: v for k, v in logs.items() if isinstance(v, int | float)}, **self.latest}
        if state.is_world_process_zero:
            append_line(self.path, self.latest)
        for name in ("loss", "reward"):
            check_finite(f"the {name} is", logs.get(name, 0.0), state.global_step)


class HeldOut(TrainerCallback):
    """The held-out loss before the first step, in nats per token; `AfterLastStep`: after the last.

    Trackers get it as eval_loss, what Trainer calls it, by `send`.
    """

    def __init__(self, rows: PackedRows, batch_size: int, records: Records, together: Collate = collate) -> None:
        self.rows, self.batch_size, self.path, self.together = rows, batch_size, records.path, together
        self.send: Callable[[dict[str, float]], None] = lambda logs: None
        earlier = [r["held_out_loss"] for r in records.before if r["step"] == 0]
        self.before: float | None = earlier[0] if earlier else None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        if self.before is None and state.global_step == 0:
            self.before = held_out_loss(model, self.rows, self.batch_size, args.device, self.together)
            self._record(args, {"step": 0, "held_out_loss": self.before})

    def conclude(self, args: TrainingArguments, step: int, model: Any) -> None:
        """Measures and records the loss of the trained model."""
        loss = held_out_loss(model, self.rows, self.batch_size, args.device, self.together)
        self._record(args, {"step": step, "held_out_loss": loss, "final": True})

    def _record(self, args: TrainingArguments, record: dict[str, Any]) -> None:
        if args.process_index == 0:
            append_line(self.path, record)
        self.send({"eval_loss": record["held_out_loss"]})
        check_finite("the held-out loss is", record["held_out_loss"], record["step"])


class AfterLastStep(TrainerCallback):
    """Concludes a run; comes before the trackers of --report-to, whose runs end with the training."""

    def __init__(self, conclude: Callable[[TrainingArguments, int, Any], None]) -> None:
        self.conclude = conclude

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        if state.global_step >= state.max_steps:
            self.conclude(args, state.global_step, model)


def check_finite(what: str, value: float, step: int) -> None:
    """NotFiniteError for a number that shows that a run has diverged."""
    if not math.isfinite(value):
        begun = "lower --learning-rate; checkpoints are kept"
        hint = begun if step > 1 else "nothing was learned yet; give a --model of finite weights, or --dtype float32"
        raise NotFiniteError(f"{what} {value} at step {step}: {hint}")


@torch.no_grad()
def held_out_loss(
    model: Any, rows: PackedRows, batch_size: int, device: torch.device, together: Collate = collate
) -> float:
    """Mean negative log-likelihood per predicted token over all rows (not a mean of the batches' means).

    together: makes a batch of rows, or a rank's part of it; the sums of all ranks are divided by each other.
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in DataLoader(rows, batch_size=batch_size, collate_fn=together):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        total += float(model(**batch, num_items_in_batch=1).loss)
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., 1:]
        count += int((labels != IGNORED).sum())
    model.train(was_training)
    totals, counts = zip(*gather_object([(total, count)]), strict=True)
    return sum(totals) / max(sum(counts), 1)


class OwnCheckpoints(TrainerCallback):
    """Marks each checkpoint as the run's own before Trainer fills it, seals it afterwards, keeps the newest; last."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_save:
            first(lambda: begin_checkpoint(self.place, state.global_step))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        PartialState().wait_for_everyone()  # each rank writes its own random state
        first(lambda: finish_checkpoint(self.place, state.global_step))


class GentleStop(TrainerCallback):
    """Ctrl-C, SIGTERM or SIGHUP while steps run: finish this one, save a checkpoint, stop. A second one stops at once.

    Outside the steps (measuring a loss, before anything was learned) the first one stops at once too.
    """

    def __init__(self, console: Console) -> None:
        self.asked, self.stepping, self.console = False, False, console
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> GentleStop:
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it on purpose
                self.previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        if self.asked or not self.stepping:
            raise KeyboardInterrupt
        self.asked = True
        self.console.print("stopping after this step, with a checkpoint; once more stops at once", soft_wrap=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.stepping = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.asked:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.stepping = False
