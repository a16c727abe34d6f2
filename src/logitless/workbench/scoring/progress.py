"""How far a run is: a bar with speed and the time that is left, or a line now and then without a terminal."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import rich.progress
from rich.console import Console

from ...units import plural
from ..common.say import LINES, say

MOST_PROBLEMS = 10  # that are shown while the run goes on; all are counted


class Progress:
    """Shows the share of the input that is read; nothing without a console (the other ranks)."""

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self.begin, self.first, self.shown = time.perf_counter(), 0.0, 0
        self.share, self.tokens, self.bad = 0.0, 0, 0
        self.kept = False  # whether parts of an unfinished run were there already
        self.last: int | None = None  # of the documents that are reported
        self.bar: rich.progress.Progress | None = None

    def __enter__(self) -> Progress:
        if self.console is not None and self.console.is_terminal:
            columns = rich.progress.BarColumn(bar_width=28), rich.progress.TaskProgressColumn()
            self.bar = rich.progress.Progress(
                rich.progress.TextColumn("[bold]scoring"),
                *columns,
                rich.progress.TextColumn("{task.fields[line]}"),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=1.0, line="")
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        if self.console is not None:
            say(self.console, text)

    def passed(self, share: float) -> None:
        """`share` of the input is passed: scored now or before, another rank's, or nothing that has a score."""
        if not self.tokens:
            self.begin, self.first = time.perf_counter(), share
        self.share = share
        self._show(share)

    def scored(self, tokens: int, part: float, share: float) -> None:
        """`tokens` more are scored, and `part` of the way from what is done to `share` is gone."""
        self.tokens += tokens
        self._show(self.share + part * (share - self.share))

    def _show(self, share: float) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=share, line=self._line(share))
        elif (lines := int(share * LINES)) > self.shown:
            self.shown = lines
            self.say(f"{share:>4.0%} · {self._line(share)}")

    def _line(self, share: float) -> str:
        if not self.tokens:
            return "scored before, and kept" if self.kept else "nothing to score so far"
        took = time.perf_counter() - self.begin
        left = timedelta(seconds=round(took * (1 - share) / max(share - self.first, 1e-9)))
        return f"{plural(self.tokens, 'token')} · {self.tokens / took:,.0f} tokens/s · {left} left"

    def problems(self, pieces: list[dict[str, Any]]) -> None:
        """Reports the documents among these that were skipped."""
        for piece in pieces:
            if "why" in piece and piece["document"] != self.last:  # once, though it may be in many pieces
                self.bad, self.last = self.bad + 1, piece["document"]
                if self.bad <= MOST_PROBLEMS:
                    self.say(f"skipped {piece['name']}: {piece['why']}")
                elif self.bad == MOST_PROBLEMS + 1:
                    self.say("further documents that are skipped are counted at the end")
