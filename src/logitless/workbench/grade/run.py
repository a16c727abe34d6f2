"""`run`: a policy aligned on soft tokens, or by the methods that they are compared with, from options to a summary."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ..runs.trackers import check_tracker
from ..runs.trainer import quiet
from . import single
from .comparison import compare, report
from .config import GradeConfig


def run(config: GradeConfig, console: Console | None = None) -> dict[str, Any]:
    """Aligns as `config` says and returns the summary, which also lies in the run's directory.

    Writes checkpoint-N (to resume from), model (weights as safetensors, tokenizer), prompts.jsonl, metrics.jsonl,
    summary.json, run.json, and where none is given, reward (the classifier); for method all see `compare.run_all`.
    One device. Raises LogitlessError for bad input and Interrupted when asked to stop.
    """
    console = console or Console(stderr=True)
    quiet()
    check_tracker(config.check().report_to)
    return compare.run_all(config, console) if config.method == "all" else single.run_one(config, console)


def show(summary: dict[str, Any], console: Console) -> None:
    """What a run came to, in a few lines or a table."""
    shown = report.show if summary["method"] == "all" else single.show
    shown(summary, console)
