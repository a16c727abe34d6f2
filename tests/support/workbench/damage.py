"""What may lie in the place of a file or a template: every kind of damage that tests of bad inputs go through."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

DEEP = 100_000

# Chat templates that fail, never end, or take or write too much; and what is said of them.
TEMPLATES = {
    "a loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "did not end in"),
    "a power": ("{{ 9 ** (9 ** 9) }}", "did not end in"),
    "memory": ("{{ 'a' * 10000000000 }}", "needs more than 256 MiB"),
    "a list": ("{% set x = [0] * 3000000000 %}", "needs more than 256 MiB"),
    "padding": ("{{ 'a'.center(10000000000) }}", "needs more than 256 MiB"),
    "much": ("{{ 'a' * 2000000 }}", "it wrote 2,000,000 characters"),
    "a refusal": ("{{ raise_exception('no') }}", "failed: no"),
    "a gap": ("{{ messages[7].x.y }}", "failed"),
    "syntax": ("{% if %}", "failed"),
    "a filter": ("{{ 1|nothing }}", "failed"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed"),
    "depth": ("{{ " + "(" * 10_000 + " }}", "failed"),
    "an escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
}
MARK = "{% generation %}{% endgeneration %}"  # of a template that itself says what the assistant says


def _put(content: bytes | str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What may lie in the place of a JSON file of ours.
JSON: dict[str, Callable[[Path], object]] = {
    "empty": _put(""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deep": _put("[" * DEEP),
    "deep in an object": _put('{"a": ' + "[" * DEEP),
    "bytes": _put(b"\xff\xfe\x00"),
    "digits": _put("9" * 5000),
    "a list": _put("[1]"),
    "a number": _put("5"),
    "null": _put("null"),
    "a folder": _folder,
    "a pipe": _pipe,
}


def changed(place: Path, copy: Path, name: str, change: Callable[[Path], object]) -> Path:
    """A copy of a folder with a file of it changed."""
    shutil.copytree(place, copy)
    change(copy / name)
    return copy
