"""`run`: a model evaluated on text, from an `EvalConfig` to a folder with its rows, documents, summary and page."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ..scoring.block import Scorer
from ..scoring.parts import Parts
from ..scoring.run import measured
from ..scoring.summary import circumstances, finished, merged
from .config import EvalConfig
from .measure import measure, numbers_of
from .page import page, write_pages
from .report import by_document, curves
from .tasks import run_tasks

SCHEMA = 1


def run(config: EvalConfig, console: Console | None = None) -> dict[str, Any]:
    """Evaluates as `config` says and returns the summary.

    Writes config.folder: tokens.parquet, documents.jsonl, summary.json and page.html, each whole or not at all. It
    goes on after a kill, shares the work among ranks and passes over bad documents as `logitless score` does.
    Raises LogitlessError for bad input and Interrupted. On the other ranks the summary is empty.
    """
    if config.check().tasks:
        return run_tasks(config, console)
    return measured(
        config,
        lambda subject: measure(config, subject),
        lambda *done: conclude(config, *done),
        console,
    )


def conclude(config: EvalConfig, scorer: Scorer, parts: Parts, count: int, took: dict[str, Any]) -> dict[str, Any]:
    """Writes the folder from the parts, and removes them last: until then the same command makes it anew."""
    lines = config.folder / "documents.jsonl"
    found = merged(config, scorer, parts, count, lines, lambda known: numbers_of(known, config.top_k))
    options = {name: found.pop(name) for name in config.deciding()} | {"bins": config.bins}
    summary = {
        "schema": SCHEMA,
        "options": options,
        **found,
        "out": str(config.folder),
        "by_document": by_document(lines),
        **curves(config.place, config.bins),
        **took,
        **circumstances(config, scorer),
    }
    write_pages(config, summary, page(summary))
    return finished(config, parts, summary)
