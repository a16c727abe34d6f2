"""Several ranks of one run: what they must agree on, errors that all of them raise, and ranks that are lost."""

from __future__ import annotations

import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from ...errors import LogitlessError, OptionError, RankError, remote_error
from ...units import plural
from ...versions import version_of
from ...vocab.face import reason_of
from ..common.signals import STOPPING, leave_closed_terminal
from .ending import Interrupted

Value = TypeVar("Value")
LIBRARIES = ("logitless", "torch", "transformers", "accelerate")
UNTOUCHED = (signal.SIG_IGN, None)  # handlers: nohup's, and one that is not Python's
LOST = ("connection closed by peer", "connection reset", "timed out", "timeout", "socket", "gloo", "nccl")


def agree(**facts: Any) -> None:
    """RankError, the same on all ranks, where ranks differ in a fact or in the versions of what they run on."""
    if not dist.is_initialized():
        return
    each = _of_all({"python": platform.python_version(), **{name: version_of(name) for name in LIBRARIES}, **facts})
    for name in dict.fromkeys(name for theirs in each for name in theirs):
        values = [theirs.get(name, "absent") for theirs in each]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise RankError(
                f"ranks disagree on {name}: {values[0]} on rank 0, {values[other]} on rank {other}; start all with "
                "the same installation, options and files"
            )


def first(work: Callable[[], Value]) -> Value:
    """What the first rank's `work` returns, on every rank; its LogitlessError is raised on all of them."""
    if not dist.is_initialized():
        return work()
    said: list[Any] = [None, None, ""]
    if dist.get_rank() == 0:
        try:
            said[0] = work()
        except LogitlessError as error:
            said[1:] = [type(error).__name__, str(error)]
    dist.broadcast_object_list(said)
    if said[1] is not None:
        raise remote_error(said[1], said[2])
    return said[0]


def together(work: Callable[[], Value]) -> Value:
    """What `work` returns here, once it has worked on every rank; else the first rank's LogitlessError, on all."""
    if not dist.is_initialized():
        return work()
    value: Any = None
    said = ("", "")
    try:
        value = work()
    except LogitlessError as error:
        said = (type(error).__name__, str(error))
    each = _of_all(said)
    failed = [rank for rank, (name, _) in enumerate(each) if name]
    if not failed:
        return value
    name, text = each[failed[0]]
    where = "" if len(set(each)) == 1 else f" (rank {failed[0]} of {len(each)})"
    raise remote_error(name, text + where)


def _of_all(mine: Value) -> list[Value]:
    """What every rank says, in their order."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    return each


def accumulation(per_step: int, batch_size: int, groups: int, sharing: int = 1) -> int:
    """Forward passes of each rank that make a step of `per_step` sequences. Raises OptionError where none do.

    groups: of `sharing` ranks each, with sequences of their own.
    """
    if per_step % (batch_size * groups):
        who, also = f"{groups} ranks", ""
        if sharing > 1:
            who, also = f"{groups} groups of {sharing} ranks", f" and is a multiple of {sharing}"
        most = per_step // batch_size
        fitting = f"a number of ranks that divides {most * sharing}{also}" if most > 1 else plural(sharing, "rank")
        raise OptionError(
            f"a step of this run is {plural(per_step, 'sequence')}, which {who} with {batch_size} at a time "
            f"cannot share evenly: launch {fitting}"
        )
    return per_step // (batch_size * groups)


@contextmanager
def lost(how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """Turns the loss of another rank, and the end of this one by a signal, into one line.

    Whichever comes first: a collective fails with the other rank, or the launcher, which ends all ranks as soon as it
    misses one or is itself stopped, sends its signal; then the rank is interrupted.
    """
    if not dist.is_initialized():
        yield
        return

    said: list[Interrupted] = []
    previous = {number: handler for number in STOPPING if (handler := signal.getsignal(number)) not in UNTOUCHED}

    def told(what: str) -> str:
        for number in previous:
            signal.signal(number, signal.SIG_IGN)  # until this is said
        why = "the first error among the ranks' logs, if there is one, says why"
        return f"rank {dist.get_rank()} {what}; {why}; {how_to_go_on()}"

    def ended(number: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        name = signal.Signals(number).name
        what = f"was ended by its launcher ({name}), as every rank is when one is lost or all are stopped"
        said.append(Interrupted(told(what)))
        raise said[0]

    for number in previous:
        signal.signal(number, ended)
    try:
        yield
    except BaseException as error:
        if said:  # whatever came of it: torch's C++ raises an error of its own in its place
            raise said[0] from error
        cause = error.__cause__ if isinstance(error, RankError) else error  # that a split head's collective failed
        if not isinstance(cause, RuntimeError) or isinstance(cause, LogitlessError):
            raise
        if not any(sign in str(cause).lower() for sign in LOST):
            raise
        raise RankError(told(f"lost another rank ({reason_of(cause)})")) from error
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is ended:
                signal.signal(number, handler)
