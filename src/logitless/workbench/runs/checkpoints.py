"""Checkpoints of a run: which are its own, which are whole, and which a killed process left unfinished."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ConfigError, DataError, OptionError
from ...hashes import hash_of
from ..common import files
from ..common.files import read_lines, read_object, remove_all_leftovers, remove_whole, write_whole
from ..common.sealed import hashes_of, read_sealed, write_sealed
from ..common.written import METRICS_FILE, OWN, RUN_FILE

PREFIX = "checkpoint-"
MARK = "run_id"  # of a checkpoint: the run that it belongs to; it is there before anything else
SEAL = "seal.json"  # of a whole checkpoint: hashes of what was written; it comes last
KEPT = 2  # checkpoints of a run


def id_of(run: Path) -> str:
    """What tells this run from all others; empty where none has begun."""
    try:
        return str(read_object(run / RUN_FILE).get("id", ""))
    except DataError:
        return ""


def checkpoint_at(run: Path, step: int) -> Path:
    """Where a run's checkpoint of this step lies."""
    return run / f"{PREFIX}{step}"


def checkpoints(run: Path) -> list[Path]:
    """The run's own whole checkpoints, oldest first."""
    return sorted((path for path in _own(run) if _is_whole(path)), key=_step_of)


def last_checkpoint(run: Path) -> tuple[Path, int] | None:
    """The newest whole checkpoint and its step."""
    whole = checkpoints(run)
    return (whole[-1], _step_of(whole[-1])) if whole else None


def begin_checkpoint(run: Path, step: int) -> None:
    """An empty checkpoint with the run's mark, for others to fill. OptionError where another run's lies there."""
    path = checkpoint_at(run, step)
    if path.exists() and not _is_own(path, id_of(run)):
        raise OptionError(strange(path))
    write_whole(path, lambda new: mark(run, new))


def mark(run: Path, checkpoint: Path) -> None:
    """Makes the directory of a checkpoint, if need be, and says in it whose it is."""
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / MARK).write_text(id_of(run), encoding="utf-8")


def seal(checkpoint: Path) -> None:
    """Says of a checkpoint that it is whole, and what it holds; the run's records up to here are part of it."""
    shutil.copy(checkpoint.parent / METRICS_FILE, checkpoint / METRICS_FILE)
    write_sealed(checkpoint / SEAL, {"step": _step_of(checkpoint), "files": hashes_of(checkpoint)})


def finish_checkpoint(run: Path, step: int) -> None:
    """Seals a checkpoint that is filled, and removes those that are older than the newest."""
    seal(checkpoint_at(run, step))
    prune(run)


def records_at(checkpoint: Path | None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that a run goes on behind: those before its checkpoint, none without one."""
    return [] if checkpoint is None else read_lines(checkpoint / METRICS_FILE)


def prune(run: Path) -> None:
    """Removes the run's own whole checkpoints but for the newest."""
    for path in checkpoints(run)[:-KEPT]:
        remove_whole(path)


def strange_checkpoint(run: Path) -> Path | None:
    """A checkpoint in the run's directory that is not its own."""
    own = set(_own(run))
    return next((path for path in sorted(run.glob(f"{PREFIX}*")) if path.is_dir() and path not in own), None)


@contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """DataError for whatever reading a checkpoint raises that holds something else than was saved."""
    with files.readable(checkpoint, "remove it to go on from an earlier one, or anew"):
        yield


def strange(checkpoint: Path) -> str:
    """What to do about a checkpoint of another run."""
    return f"{checkpoint} is not of the run in this directory: move it elsewhere"


def check_whole(checkpoint: Path) -> None:
    """ConfigError where a file of a checkpoint has been lost or changed since it was written."""
    path = checkpoint / SEAL
    try:
        found = read_sealed(path)
    except DataError:
        _refuse(checkpoint, f"{path} is damaged")
    if found["step"] != _step_of(checkpoint):
        _refuse(checkpoint, f"{checkpoint} is of step {found['step']}")
    for name, known in found["files"].items():
        path = checkpoint / name
        if not path.is_file():
            _refuse(checkpoint, f"{path} is missing")
        if hash_of(path) != known:
            _refuse(checkpoint, f"{path} is damaged")


def discard_unfinished(run: Path) -> None:
    """Removes what a killed process left of the run's own: it only takes space."""
    for path in _own(run):
        remove_all_leftovers(path)
        if _is_numbered(path) and not _is_whole(path):
            remove_whole(path)
    prune(run)
    remove_all_leftovers(run, OWN)


def _own(run: Path) -> Iterator[Path]:
    known = id_of(run)
    return (path for path in run.glob(f"{PREFIX}*") if path.is_dir() and _is_own(path, known))


def _is_own(checkpoint: Path, run_id: str) -> bool:
    """Whether its mark says so, or its seal says that it did: `check_whole` refuses a mark that was damaged since."""
    mark = run_id.encode()
    return _mark_of(checkpoint) == mark or _sealed_mark(checkpoint) == hash_of(mark)


def _mark_of(checkpoint: Path) -> bytes:
    """The mark; empty where there is none that can be read."""
    with suppress(DataError), readable(checkpoint / MARK):
        return (checkpoint / MARK).read_bytes()
    return b""


def _sealed_mark(checkpoint: Path) -> str | None:
    """The hash of the mark that a whole checkpoint was written with."""
    with suppress(DataError):
        return read_sealed(checkpoint / SEAL)["files"].get(MARK)
    return None


def _is_whole(checkpoint: Path) -> bool:
    return _is_numbered(checkpoint) and (checkpoint / SEAL).exists()


def _is_numbered(checkpoint: Path) -> bool:
    """Whether it has a run's own kind of name; others, as of copies, are their owner's."""
    return checkpoint.name.removeprefix(PREFIX).isdecimal()


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def _refuse(checkpoint: Path, fault: str) -> NoReturn:
    """ConfigError with what is wrong, and where the run goes on without the checkpoint."""
    run = checkpoint.parent
    earlier = [path for path in checkpoints(run) if _step_of(path) < _step_of(checkpoint)]
    whence = earlier[-1].name if earlier else "the start"
    raise ConfigError(f"--resume {run}: {fault}; remove {checkpoint} to go on from {whence}")
