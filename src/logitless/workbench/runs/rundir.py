"""The directory of a run: a new one for a new run, the old one for a resumed run; and what ends a run early."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import ConfigError, LogitlessError, OptionError
from .checkpoints import checkpoints, damaged_file, discard_unfinished, last_checkpoint
from .files import write_json
from .options import RESUMABLE, Options, RunOptions, from_dict

RUN_FILE, SUMMARY_FILE, TOKENS_FILE = "run.json", "summary.json", "tokens.npz"
NEARLY_NOTHING = 2**20  # bytes left on a disk that is called full
CUT_SHORT = ("failed writing file", "unexpected pos", "iostream error")  # torch's writers, on a full disk too


class Interrupted(KeyboardInterrupt):
    """Stopped on request; the message says how to go on."""


class OutOfSpace(LogitlessError, OSError):
    """The disk is full; whole checkpoints are kept."""


def stored(run: Path, default: Options) -> Options:
    """The options that the run in this directory was started with, of the default's kind; ConfigError without one."""
    try:
        values = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"--resume {run}: no run in this directory (expected {RUN_FILE})") from None
    try:
        return from_dict(values, RUN_FILE, default)
    except OptionError as error:
        raise ConfigError(
            f"--resume {run}: expected a run of this command and version; go on with those that started it ({error})"
        ) from None


def claim(config: RunOptions, name: str) -> Path:
    """The directory to write into, runs/NAME unless given. OptionError for another run's and one it cannot write."""
    if config.resume is not None:
        return _continue(config, config.resume)
    place = config.output_dir or _free(Path("runs") / name)
    if (place / RUN_FILE).exists():
        raise OptionError(f"{place} holds a run already: --resume {place} continues it, or choose another --output-dir")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output-dir {place}: {error.strerror}") from None
    return place


def record(config: RunOptions, place: Path, ranks: int = 1) -> None:
    """Writes run.json: from now on, the run can be resumed."""
    write_json(place / RUN_FILE, {"schema": 1, "config": config.to_dict(), "ranks": ranks})


def ranks_at_start(place: Path) -> int:
    """How many ranks with sequences of their own the run in this directory was started with."""
    return int(json.loads((place / RUN_FILE).read_text(encoding="utf-8")).get("ranks", 1))


def _continue(config: RunOptions, run: Path) -> Path:
    before = stored(run, type(config)())
    for name, value in config.to_dict().items():
        if name not in RESUMABLE and value != before.to_dict()[name]:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"--resume {run}: {option} cannot change from {before.to_dict()[name]} to {value}")
    found = last_checkpoint(run)
    if (run / SUMMARY_FILE).exists() and found and found[1] >= config.max_steps:
        raise OptionError(f"--resume {run}: finished at step {found[1]}; raise --max-steps to train on")
    if found and (broken := damaged_file(found[0])):
        kept = checkpoints(run)[:-1]
        whence = kept[-1].name if kept else "the start"
        raise ConfigError(f"--resume {run}: {broken} is damaged; remove {found[0]} to go on from {whence}")
    discard_unfinished(run)
    return run


def _free(wanted: Path) -> Path:
    place, number = wanted, 1
    while (place / RUN_FILE).exists():
        number += 1
        place = wanted.with_name(f"{wanted.name}-{number}")
    return place


@contextmanager
def explained(place: Path, command: str) -> Iterator[None]:
    """Turns an interruption and a full disk into one line that says how to go on; no whole checkpoint is lost."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(how_to_go_on(place, command)) from None
    except Exception as error:
        if not _disk_full(error, place):
            raise
        discard_unfinished(place)
        raise OutOfSpace(f"no space left at {place}: free some, then {how_to_go_on(place, command)}") from error


def how_to_go_on(place: Path, command: str) -> str:
    """The command that continues the run, and whence."""
    if not (place / RUN_FILE).exists():
        return "start again, nothing was trained yet"
    found = last_checkpoint(place)
    finished = any(place.glob(f"*/{SUMMARY_FILE}"))  # runs of a comparison
    whence = f"step {found[1]}" if found else "what is not finished" if finished else "the start"
    return f"{_launch(command)} --resume {place} goes on from {whence}"


def _launch(command: str) -> str:
    """The start of a command line that launches a command as this process was launched."""
    ranks, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks == 1:
        return f"logitless {command}"
    launcher = f"torchrun --nproc-per-node {ranks}" if here == ranks else "on every machine the same launch of"
    return f"{launcher} -m logitless.cli {command}"


def _disk_full(error: Exception, place: Path) -> bool:
    """torch and safetensors report a full disk as a RuntimeError and an error of their own, not always by name."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if "No space left" in str(error):
        return True
    cut_short = any(sign in str(error) for sign in CUT_SHORT)
    return cut_short and shutil.disk_usage(place).free < NEARLY_NOTHING
