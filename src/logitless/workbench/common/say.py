"""Lines on the console, where nothing else speaks."""

from __future__ import annotations

from rich.console import Console
from transformers.utils import logging as transformers_logging

LINES = 10  # of a whole run, without a terminal


def say(console: Console, text: str) -> None:
    """One line as it is: not wrapped, not coloured."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def quiet() -> None:
    """Leaves the console to the run: no warnings and progress bars of transformers."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
