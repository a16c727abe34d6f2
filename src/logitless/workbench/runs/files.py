"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import DataError


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` on a temporary path (file or directory) and then puts the result in `path`'s place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        if temporary.is_dir() and path.is_dir():
            previous = path.with_name(f".{path.name}.{os.getpid()}.old")
            os.replace(path, previous)
            os.replace(temporary, path)
            shutil.rmtree(previous)
        else:
            os.replace(temporary, path)
    finally:
        _remove(temporary)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, whole or not at all."""
    write_text(path, strict_json(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """`text` as UTF-8, whole or not at all."""
    write_whole(path, lambda temporary: _write_text(temporary, text))


def strict_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON that any reader takes: null where a number is NaN or infinite, for which JSON has no words."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: finite(y) for name, y in x.items()}
        if isinstance(x, list | tuple):
            return [finite(y) for y in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(value), indent=indent, allow_nan=False)


def read_json(path: Path) -> Any:
    """What `write_json` wrote, of a file that a resumed run can make anew; DataError where it was damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise DataError(damaged(path)) from None


def damaged(path: Path) -> str:
    """What to do about a file that a resumed run can make anew."""
    return f"{path} is damaged: delete it, and --resume makes it anew"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; a last line that a killed process left unfinished is not one of them.

    Raises DataError for any other line that is not a record.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [_record(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.endswith("\n")]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """All records as a JSON-lines file, whole or not at all."""
    write_text(path, "".join(strict_json(r) + "\n" for r in records))


def append_line(path: Path, record: dict[str, Any]) -> None:
    """One more record, in a single write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(strict_json(record) + "\n")


def _record(line: str, where: str) -> dict[str, Any]:
    with suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict):
            return record
    raise DataError(f"{where}: expected a record in JSON, got a damaged line; remove it")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
