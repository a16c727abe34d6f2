"""The terminal: styles are this program's own, and text of others (names of files and models) is shown, not obeyed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.errors import MarkupError
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text

from ..printable import shown

OWN = re.compile(r"(\[/?(?:bold red|bold|dim|red|green)?\])")  # the tags that commands use


class Screen(Console, RenderHook):
    """A rich console that takes no tag for a style but `OWN`, and writes no control character that is not its own."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, emoji=False)
        self.push_render_hook(self)

    def print(self, *objects: Any, crop: bool = False, **how: Any) -> None:
        """As rich does, but a line that is wider than the console keeps its end."""
        super().print(*objects, crop=crop, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        if how.get("markup") is False:
            return super().render_str(text, **how)
        parts = OWN.split(text)  # every other one is a tag
        told = "".join(part if i % 2 else escape(part) for i, part in enumerate(parts))
        try:
            return super().render_str(told, **how)
        except MarkupError:  # a name that looks like one of them
            return super().render_str(text, **{**how, "markup": False})

    def on_broken_pipe(self) -> None:
        """The reader left (`| head`): no more is shown, and the command goes on to its files and its own status."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Called by rich before anything is printed."""
        return [_Safe(renderable) for renderable in renderables]


class _Safe:
    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return self._safe(console.render(self.inner, options))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.inner)

    def _safe(self, segments: Iterable[Segment]) -> RenderResult:
        return (x if x.control else Segment(shown(x.text), x.style) for x in segments)
