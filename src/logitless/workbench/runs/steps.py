"""The steps of a run that has a Trainer: what happens beside them, and how they are stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerState

from .callbacks import AfterLastStep, GentleStop, OwnCheckpoints
from .progress import ProgressBar
from .restoring import guard_loading, refuse_incomplete, saving_as_trained
from .trackers import explain_failures


@contextmanager
def taking_steps(
    trainer: Any, place: Path, report_to: str, checkpoint: Path | None, held_out: Any, bar: ProgressBar
) -> Iterator[TrainerState | None]:
    """While it lasts, a trainer takes its run's steps, or finishes the run; yields where the checkpoint stands.

    held_out: the callback that measures held-out rows, and has `conclude`. What a trainer raises is one line. Raises
    KeyboardInterrupt in the end where it was asked to stop.
    """
    alone = trainer.args.world_size == 1  # ranks that stop at different steps would wait for each other forever
    stop = GentleStop(bar.console) if alone else None
    for callback in (bar.records, held_out, bar, OwnCheckpoints(place)):
        trainer.add_callback(callback)
    # GentleStop hears that the steps have ended before the trained model is measured, which a signal then ends at once
    trainer.callback_handler.callbacks[:0] = [*([stop] if stop else []), AfterLastStep(held_out.conclude)]
    trainer.remove_callback(PrinterCallback)
    explain_failures(trainer, report_to)
    refuse_incomplete(trainer)
    began = guard_loading(trainer, checkpoint) if checkpoint else None
    with bar, stop or nullcontext(), saving_as_trained(trainer.model):
        yield began
    if stop and stop.asked:
        raise KeyboardInterrupt
