"""What somebody else's program may take: seconds, and memory beyond what this process has."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...units import format_bytes

try:
    import resource
except ImportError:  # Windows: no limits there
    resource = None

STATM = Path("/proc/self/statm")  # Linux; elsewhere memory has no limit


@contextmanager
def bounded(seconds: float, nbytes: int) -> Iterator[None]:
    """TimeoutError in what takes longer, MemoryError in what takes more.

    A signal stops loops, and the limit on memory what C does in a single call, which no signal interrupts. Off the main
    thread, where no signal arrives, and on Windows nothing is limited.
    """
    if resource is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    timer = signal.setitimer(signal.ITIMER_REAL, 0)  # somebody else's, who gets it back
    handler = signal.signal(signal.SIGALRM, _stop)
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_most(nbytes, before[0]), before[1]))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    except _TooLong:
        raise TimeoutError(f"it did not end in {seconds:g} s") from None
    except MemoryError:
        raise MemoryError(f"it needs more than {format_bytes(nbytes)} of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        resource.setrlimit(resource.RLIMIT_AS, before)


class _TooLong(BaseException):
    """No Exception: programs go on behind those, as jinja does where it cannot compute an expression beforehand."""


def _stop(*_: object) -> None:
    raise _TooLong


def _most(more: int, limit: int) -> int:
    """The bytes that this process has mapped and `more`, within its limit, which is negative where there is none."""
    if not STATM.exists():
        return limit
    most = int(STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + more
    return most if limit < 0 else min(most, limit)
