"""Hashes of several files, and JSON that says whether it is as it was written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...hashes import hash_of
from .files import MADE_ANEW, read_object, readable, strict_json, write_json

HASH = "hash"  # of all else that such a file holds


def together(hashes: Iterable[str]) -> str:
    """One hash of several, in their order."""
    return hash_of("".join(hashes).encode())


def hashes_of(folder: Path, entries: Iterable[str] = (".",)) -> dict[str, str]:
    """The hash of each file that these entries of a folder are or hold, by its name from there."""
    found = {path for entry in entries for path in (folder / entry, *(folder / entry).glob("**/*"))}
    paths = sorted(path for path in found if path.is_file())
    return {path.relative_to(folder).as_posix(): hash_of(path) for path in paths}


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """`value` as JSON with a hash of it, whole or not at all."""
    write_json(path, {**value, HASH: _hash_of(value)})


def read_sealed(path: Path, remedy: str = MADE_ANEW) -> dict[str, Any]:
    """What `write_sealed` wrote; DataError, with what to do, for anything else."""
    found = read_object(path, remedy)
    with readable(path, remedy):
        if found.pop(HASH, None) != _hash_of(found):
            raise ValueError("its hash is of other values")
    return found


def _hash_of(value: dict[str, Any]) -> str:
    return hash_of(strict_json(value).encode())
