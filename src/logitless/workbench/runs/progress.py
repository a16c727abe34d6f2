"""Progress on a terminal, with the time that is left; a line now and then where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...units import format_bytes
from ..common.say import LINES, say
from .callbacks import Records


class TimeLeft(ProgressColumn):
    """The steps to come at the pace of those before, from the first one on: rich's own forgets steps of 30 s."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        pace, since = task.fields.get("pace"), time.perf_counter() - task.fields.get("at", 0.0)
        if pace is None or task.total is None:
            return Text("")
        seconds = round(max(0.0, pace * task.remaining - since)) if task.remaining else 0
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        shown = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"
        return Text(shown, style="progress.remaining")


class Bar:
    """Steps of a run, within a `with` block; `done` of `total` were taken before."""

    def __init__(self, console: Console, name: str, total: int, done: int = 0) -> None:
        self.console, self.total, self.before = console, total, done
        self.every, self.started = max(1, total // LINES), time.perf_counter()
        self.bar: Progress | None = None
        if console.is_terminal:
            columns = TextColumn(f"[bold]{name}"), BarColumn(bar_width=28), MofNCompleteColumn()
            self.bar = Progress(*columns, TextColumn("{task.fields[line]}"), TimeLeft(), console=console)
            self.task = self.bar.add_task("", total=total, completed=done, line="")
            self.bar.start()

    def put(self, done: int, line: str) -> None:
        """So many steps are done, and what the last one came to."""
        now = time.perf_counter()
        if self.bar is not None:
            pace = (now - self.started) / max(1, done - self.before)
            self.bar.update(self.task, completed=done, line=line, pace=pace, at=now)
        elif done % self.every == 0 or done in (1, self.total):
            say(self.console, f"step {done:>5}/{self.total} · {line}")

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the terminal as it was, whatever ended the run."""
        if self.bar is not None:
            self.bar.stop()


class ProgressBar(TrainerCallback):
    """Shows what `Records` last recorded; comes after it in the list of callbacks."""

    def __init__(self, records: Records, console: Console) -> None:
        self.records, self.console = records, console
        self.bar: Bar | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self.bar = Bar(self.console, "training", state.max_steps, state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if "loss" in (logs or {}) and self.bar is not None:
            self.bar.put(state.global_step, self.line(self.records.latest))

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
            self.bar.__exit__()


@contextmanager
def working(console: Console) -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is done now, and for how long altogether; what it yields changes it."""
    if not console.is_terminal:
        yield lambda what: None
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), Elapsed(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what: bar.update(task, description=f"{what} ...")
