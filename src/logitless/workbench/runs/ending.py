"""What ends a run early: an interruption, a full disk; and the line that says how to go on."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from ...errors import DataError, OptionError
from ..common.files import read_object
from ..common.lock import release
from ..common.options import code_named
from ..common.space import OutOfSpace, room_wanted
from ..common.written import RUN_FILE, WRITTEN
from .checkpoints import discard_unfinished, last_checkpoint

# What ends a process from outside; a terminal that closes where there is such a signal.
ENDING = tuple(number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None)
STOPPING = (signal.SIGINT, *ENDING)  # Ctrl-C too


class Interrupted(KeyboardInterrupt):
    """Stopped on request; the message says how to go on."""


@contextmanager
def explained(place: Path, command: str) -> Iterator[None]:
    """Turns an interruption and a full disk into one line that says how to go on; no whole checkpoint is lost.

    At its end, whichever that is, the directory is no longer locked.
    """
    try:
        with interrupted_by_signals():
            yield
    except KeyboardInterrupt:
        raise Interrupted(how_to_go_on(place, command)) from None
    except Exception as error:
        within = error.__cause__ if isinstance(error, OutOfSpace) else None  # what a run within this one met
        if not (wanted := room_wanted(within or error, place)):
            raise
        if launched_ranks() == 1:  # others may still be writing
            discard_unfinished(place)
        raise OutOfSpace(f"{wanted}, then {how_to_go_on(place, command)}") from error
    finally:
        begun = not (place / RUN_FILE).exists() and any(any(place.glob(name)) for name in WRITTEN)
        release(place, keep_file=begun)


@contextmanager
def stoppable(told: Callable[[], str]) -> Iterator[None]:
    """Turns an interruption into one line that ends with what is told; within a run's place `explained` does."""
    try:
        with interrupted_by_signals():
            yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(told()) from None


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal interrupt as Ctrl-C does, where nothing else is made of them; ranks have `lost`."""
    previous: dict[int, Any] = {}
    if launched_ranks() == 1 and current_thread() is main_thread():
        kept = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
        previous = {number: signal.signal(number, _interrupt) for number in kept}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    leave_closed_terminal()
    raise KeyboardInterrupt


def leave_closed_terminal() -> None:
    """Has what is written to a terminal that has closed go nowhere: it would be an error, and end a run at once."""
    for number in (1, 2):  # standard output and standard error
        try:
            os.get_terminal_size(number)
        except OSError as error:  # of files and pipes it says that they are no terminals
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def how_to_go_on(place: Path | None, command: str) -> str:
    """The command that continues the run, and whence. place: None where the run has none yet."""
    if place is None or not (place / RUN_FILE).exists():
        return "start again, nothing was trained yet"
    return f"{_launch(command)} --resume {place}{_trusting(place)} goes on from {whence(place)}"


def where_it_is(summary: dict[str, Any]) -> str:
    """What to say of a run that has ended before all of it was shown."""
    return f"the run has ended, and all of it is in {summary['output_dir']}"


def whence(place: Path) -> str:
    """Where a run that is resumed goes on."""
    found = last_checkpoint(place)
    parts = any(place.glob(f"*/{RUN_FILE}"))  # runs of a comparison
    return f"step {found[1]}" if found else "what is not finished" if parts else "the start"


def _trusting(place: Path) -> str:
    """The flag without which a resumed run's own code would be refused."""
    try:
        return " --trust-config" if code_named(read_object(place / RUN_FILE)["config"]) else ""
    except (DataError, KeyError, AttributeError):
        return ""


def launched_ranks(which: str = "WORLD_SIZE") -> int:
    """How many processes this one was launched as one of. OptionError where the environment says no number."""
    told = os.environ.get(which, "1")
    if not told.isdecimal():
        raise OptionError(f"{which}={told!r} in the environment: expected a number of ranks; unset it, or use torchrun")
    return int(told)


def _launch(command: str) -> str:
    """The start of a command line that launches a command as this process was launched."""
    ranks, here = launched_ranks(), launched_ranks("LOCAL_WORLD_SIZE")
    if ranks == 1:
        return f"logitless {command}"
    launcher = f"torchrun --nproc-per-node {ranks}" if here == ranks else "on every machine the same launch of"
    return f"{launcher} -m logitless.cli {command}"
