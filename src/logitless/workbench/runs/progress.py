"""A progress bar with loss, speed and peak memory; one line now and then where there is no terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...units import format_bytes
from .callbacks import Records
from .say import LINES, say


class ProgressBar(TrainerCallback):
    """Shows what `Records` last recorded; comes after it in the list of callbacks."""

    def __init__(self, records: Records, console: Console) -> None:
        self.records, self.console = records, console
        self.bar: Progress | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.every = max(1, state.max_steps // LINES)
        if not (state.is_world_process_zero and self.console.is_terminal):
            return
        self.bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step, line="")
        self.bar.start()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        latest = self.records.latest
        if "loss" not in (logs or {}) or not state.is_world_process_zero:
            return
        line = self.line(latest)
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step, line=line)
        elif state.global_step % self.every == 0 or state.global_step in (1, state.max_steps):
            say(self.console, f"step {state.global_step:>5}/{state.max_steps} · {line}")

    def line(self, latest: dict[str, Any]) -> str:
        """What a step comes to."""
        return (
            f"loss {latest['loss']:.3f} · {latest['tokens_per_second']:,.0f} tokens/s · "
            f"peak {format_bytes(latest['peak_memory_bytes'])}"
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the terminal as it was, whatever ended the run."""
        if self.bar is not None:
            self.bar.stop()
