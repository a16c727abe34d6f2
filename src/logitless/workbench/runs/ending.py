"""What ends a run early: an interruption, a full disk; and the line that says how to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from ...errors import DataError
from ..common.files import read_object
from ..common.launch import launched, launched_ranks
from ..common.lock import release
from ..common.options import code_named
from ..common.signals import interrupted_by_signals
from ..common.space import OutOfSpace, room_wanted
from ..common.written import RUN_FILE, WRITTEN
from .checkpoints import discard_unfinished, last_checkpoint


class Interrupted(KeyboardInterrupt):
    """Stopped on request; the message says how to go on."""


@contextmanager
def explained(place: Path, command: str) -> Iterator[None]:
    """Turns an interruption and a full disk into one line that says how to go on; no whole checkpoint is lost.

    At its end, whichever that is, the directory is no longer locked, and is gone where it was made for a run that has
    left nothing in it.
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


def how_to_go_on(place: Path | None, command: str) -> str:
    """The command that continues the run, and whence. place: None where the run has none yet."""
    if place is None or not (place / RUN_FILE).exists():
        return "start again, nothing was trained yet"
    return f"{launched(command)} --resume {quote(str(place))}{_trusting(place)} goes on from {whence(place)}"


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
