"""Files that could not be written whole: a full disk or a limit of the process, whichever library says so."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from ...errors import LogitlessError

try:
    import resource
except ImportError:  # Windows: a process has no limit there
    resource = None

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_ROOM = (*DISK_FULL, errno.EFBIG)
NEARLY_NOTHING = 2**20  # bytes left on a disk that is called full
CUT_SHORT = ("failed writing file", "unexpected pos", "iostream error")  # torch's writers, whatever the reason


class OutOfSpace(LogitlessError, OSError):
    """The disk is full, or a file larger than the process may write; whole checkpoints are kept."""


def room_wanted(error: BaseException, place: Path) -> str:
    """What to do about an error of writing before it is tried again; empty for errors of other kinds.

    place: what was written into, where the error names no file.
    """
    number, said = getattr(error, "errno", None), str(error)
    cut_short = any(sign in said for sign in CUT_SHORT)
    nothing_left = cut_short and shutil.disk_usage(place).free < NEARLY_NOTHING
    place = getattr(error, "filename", None) or place
    if number in DISK_FULL or "No space left" in said or nothing_left:
        return f"no space left at {place}: free some"
    if number == errno.EFBIG or "File too large" in said or (cut_short and _is_limited()):
        return f"a file at {place} is larger than this process may write: raise its limit (ulimit -f)"
    return ""


def _is_limited() -> bool:
    return resource is not None and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
