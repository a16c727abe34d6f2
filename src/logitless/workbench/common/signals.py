"""Signals that end a process: as an interruption, after which nothing unfinished is left (no torch import)."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from .launch import launched_ranks

# What ends a process from outside; a terminal that closes where there is such a signal.
ENDING = tuple(number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None)
STOPPING = (signal.SIGINT, *ENDING)  # Ctrl-C too


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal interrupt as Ctrl-C does, where nothing else is made of them; ranks have `lost`."""
    previous: dict[int, Any] = {}
    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a worker that this process forked: ended as if it had no handler
            signal.signal(number, signal.SIG_DFL)
            return signal.raise_signal(number)
        leave_closed_terminal()
        raise KeyboardInterrupt

    if launched_ranks() == 1 and current_thread() is main_thread():
        kept = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
        previous = {number: signal.signal(number, interrupt) for number in kept}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave_closed_terminal() -> None:
    """Has what is written to a terminal that has closed go nowhere: it would be an error, and end a run at once."""
    for number in (1, 2):  # standard output and standard error
        try:
            os.get_terminal_size(number)
        except OSError as error:  # of files and pipes it says that they are no terminals
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
