"""A lock on a directory: one process at a time writes there, and one that ends in any way gives it back."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ...errors import OptionError

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None

LOCK_FILE = "run.lock"
# Open files, as the system keeps a lock for as long as its file is open; and the folders that were made for each.
_held: dict[Path, tuple[IO[str], Sequence[Path]]] = {}


def acquire(place: Path, made: Sequence[Path] = ()) -> bool:
    """Whether the directory's lock was free; it is this process's then, until `release`. OptionError for no file.

    made: folders that are there for the lock alone, innermost first, and go with it where nothing else lies in them.
    """
    path = place / LOCK_FILE
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OptionError(f"{path}: expected a file, got a link, a folder, a device or a pipe: move it elsewhere")
    while True:
        file = path.open("a+", encoding="utf-8")
        if not _lock(file):
            file.close()
            return False
        if _is_at(file, path):
            break
        file.close()  # its holder removed it while this process waited for it to open
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held[place.resolve()] = file, [folder.absolute() for folder in made]
    return True


def release(place: Path, keep_file: bool = False) -> None:
    """Gives the lock back, where this process holds it; `keep_file`: as a killed process leaves its file."""
    held = _held.pop(place.resolve(), None)
    if held is None:
        return
    file, made = held
    if not keep_file and _is_at(file, place / LOCK_FILE):  # not another's, of a directory that was made anew
        (place / LOCK_FILE).unlink()
    file.close()
    with suppress(OSError):  # something lies there
        for folder in made:
            folder.rmdir()


def holder(place: Path) -> str:
    """Who holds a directory's lock, in words."""
    try:
        return (place / LOCK_FILE).read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"


def _lock(file: IO[str]) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
