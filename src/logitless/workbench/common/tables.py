"""Tables on the terminal: those with columns, and names beside values."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

FOLDED = 4  # characters to which a word is folded at most
WIDEST = 10_000  # characters of a line that nothing is folded in


class WholeTable(Table):
    """A table that is wider than its console where a number would lose its end, or a column its place, otherwise."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide, folds = options.update_width(WIDEST), 0
        for column in self.columns:
            sizes = [console.measure(cell, options=wide) for cell in (column.header, *column.cells)]
            if column.no_wrap:
                column.min_width = max(size.maximum for size in sizes)
            else:
                folds += max(0, max(size.minimum for size in sizes) - FOLDED)
        least = console.measure(self, options=wide).minimum - folds
        return super().__rich_console__(console, options.update_width(max(options.max_width, least)))


def columns(*names: str, ruled: bool = False) -> Table:
    """A table with columns from ">name" (to the right), "=name" (to the left, never folded) and "<name".

    ruled: with lines around every column, in the place of one below their names.
    """
    table = WholeTable() if ruled else WholeTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        right = name[0] == ">"
        table.add_column(name[1:], justify="right" if right else "left", no_wrap=name[0] != "<", overflow="fold")
    return table


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values side by side; a file's name is no markup."""
    table = WholeTable(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
