"""Checkpoints of a run: which are its own, which are whole, and which a killed process left unfinished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from ...errors import DataError, OptionError
from ..common import files
from ..common.files import read_object, remove_all_leftovers, remove_whole, write_whole
from ..common.written import RUN_FILE

PREFIX = "checkpoint-"
MARK = "run_id"  # of a checkpoint: the run that it belongs to; it is there before anything else
KEPT = 2  # checkpoints of a run

# Trainer writes this file last, so a directory whose copy of it reads well is whole.
_LAST_FILE = "trainer_state.json"
# What a whole checkpoint holds besides, by the file that tells its kind; any of the alternatives will do.
_WEIGHTS = "model.safetensors|adapter_model.safetensors|model.safetensors.index.json"
_NEEDED = {
    "grade.pt": (),
    "sharded_state": ("scheduler.pt", "rng_state*.pth"),
    "": (_WEIGHTS, "optimizer.pt", "scheduler.pt", "rng_state*.pth"),
}


def id_of(run: Path) -> str:
    """What tells this run from all others; empty for one that was begun before runs had ids."""
    try:
        return str(read_object(run / RUN_FILE).get("id", ""))
    except DataError:
        return ""


def checkpoints(run: Path) -> list[Path]:
    """The run's own whole checkpoints, oldest first."""
    found = [(step, path) for path in _own(run) if (step := _step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def last_checkpoint(run: Path) -> tuple[Path, int] | None:
    """The newest whole checkpoint and its step."""
    whole = checkpoints(run)
    return (whole[-1], _step_of(whole[-1]) or 0) if whole else None


def begin_checkpoint(run: Path, step: int) -> None:
    """An empty checkpoint with the run's mark, for others to fill. OptionError where another run's lies there."""
    path = run / f"{PREFIX}{step}"
    if path.exists() and not _is_own(path, id_of(run)):
        raise OptionError(strange(path))
    write_whole(path, lambda new: mark(run, new))


def mark(run: Path, checkpoint: Path) -> None:
    """Makes the directory of a checkpoint, if need be, and says in it whose it is."""
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / MARK).write_text(id_of(run), encoding="utf-8")


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


def fault_of(checkpoint: Path) -> str | None:
    """What has been lost of a whole checkpoint since it was written: a file that is gone, or was cut short."""
    if not _is_at(checkpoint, read_object(checkpoint / _LAST_FILE)):
        return f"{checkpoint / _LAST_FILE} is damaged"
    kind = next(name for name in _NEEDED if (checkpoint / name).exists())
    for alternatives in _NEEDED[kind]:
        if not any(any(checkpoint.glob(pattern)) for pattern in alternatives.split("|")):
            return f"{checkpoint / alternatives.split('|')[0]} is missing"
    cut_short = next((path for path in sorted(checkpoint.iterdir()) if _is_cut_short(path)), None)
    return None if cut_short is None else f"{cut_short} is damaged"


def discard_unfinished(run: Path) -> None:
    """Removes what a killed process left of the run's own: it only takes space."""
    for path in _own(run):
        if _step_of(path) is None:
            remove_whole(path)
    remove_all_leftovers(run)


def _own(run: Path) -> Iterator[Path]:
    known = id_of(run)
    return (path for path in run.glob(f"{PREFIX}*") if path.is_dir() and _is_own(path, known))


def _is_own(checkpoint: Path, run_id: str) -> bool:
    try:
        with readable(checkpoint / MARK):
            return (checkpoint / MARK).read_text(encoding="utf-8") == run_id
    except DataError:
        return run_id == ""


def _is_cut_short(path: Path) -> bool:
    if not path.is_file():
        return not path.is_dir()  # a pipe, which would be waited for
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open  # options are read where it is not installed, too

        try:
            with safe_open(path, framework="np"):
                return False
        except (OSError, SafetensorError):
            return True
    return path.suffix in (".pt", ".pth", ".bin") and not is_zipfile(path)  # what torch.save writes


def _is_at(checkpoint: Path, state: dict[str, Any]) -> bool:
    """Whether its state is of the step that its name says."""
    step = state.get("global_step")
    return type(step) is int and step == _number(checkpoint)


def _number(checkpoint: Path) -> int | None:
    text = checkpoint.name.removeprefix(PREFIX)
    return int(text) if text.isdecimal() else None


def _step_of(checkpoint: Path) -> int | None:
    """The step of a whole checkpoint."""
    try:
        read_object(checkpoint / _LAST_FILE)
    except DataError:
        return None
    return _number(checkpoint)
