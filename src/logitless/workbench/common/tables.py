"""Tables on the terminal: those with columns, and names beside values."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text


def columns(*names: str, ruled: bool = False) -> Table:
    """A table with columns from ">name" (to the right), "=name" (to the left, never folded) and "<name".

    ruled: with lines around every column, in the place of one below their names.
    """
    table = Table() if ruled else Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        right = name[0] == ">"
        table.add_column(name[1:], justify="right" if right else "left", no_wrap=name[0] != "<", overflow="fold")
    return table


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values side by side; a file's name is no markup."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
