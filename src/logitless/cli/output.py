"""What a command says at its end: a table for people, JSON for machines; and the files that it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def deliver(
    summary: dict[str, Any], to: Path | None, show: Callable[[Console], None], is_written: bool = False
) -> None:
    """Shows the summary and writes it as JSON to `to`; `-` is standard output, and the table then goes to stderr.

    is_written: the run has written the file itself, while it could still go on.
    """
    from ..workbench.common.files import strict_json, write_json
    from .screen import Screen

    to_stdout = to is not None and str(to) == "-"
    if to is not None and not to_stdout and not is_written:  # before a reader of the table can have left
        write_json(to, summary)
    show(Screen(stderr=to_stdout))
    if to_stdout:
        print(strict_json(summary, indent=2), flush=True)  # here, where a reader that left is an error with a place
