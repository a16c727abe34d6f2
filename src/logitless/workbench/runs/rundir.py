"""The directory of a run: a new one for a new run, the old one for a resumed run; and what ends a run early."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from ...errors import ConfigError, DataError, LogitlessError, OptionError
from ..common.files import DISK_FULL, check_apart, check_utf8, parsed, read_object, readable
from ..common.lock import LOCK_FILE, acquire, holder, release
from ..common.options import RESUMABLE, Options, RunOptions, code_named, from_dict
from ..common.sealed import hashes_of, read_sealed, write_sealed
from ..common.written import OWN, PREPARED, RUN_FILE, SUMMARY_FILE, WRITTEN
from ..sources.converted import is_packed, packed_name
from .checkpoints import check_whole, discard_unfinished, last_checkpoint, strange, strange_checkpoint

SCHEMA = 2  # of run.json
BEGIN_ANOTHER = "put back what was there, or begin another run"
NEARLY_NOTHING = 2**20  # bytes left on a disk that is called full
CUT_SHORT = ("failed writing file", "unexpected pos", "iostream error")  # torch's writers, on a full disk too


class Interrupted(KeyboardInterrupt):
    """Stopped on request; the message says how to go on."""


class OutOfSpace(LogitlessError, OSError):
    """The disk is full; whole checkpoints are kept."""


def stored(run: Path, default: Options) -> Options:
    """The options that the run in this directory was started with, of the default's kind.

    Raises ConfigError where there is none, DataError where its file is damaged.
    """
    path = run / RUN_FILE
    if not path.exists():
        raise ConfigError(f"--resume {run}: no run in this directory (expected {RUN_FILE})")
    with readable(path, BEGIN_ANOTHER):
        schema = parsed(path).get("schema")
    try:
        if schema != SCHEMA:
            raise OptionError(f"{RUN_FILE} has schema {schema}, expected {SCHEMA}")
        return from_dict(read_sealed(path, BEGIN_ANOTHER)["config"], RUN_FILE, default)
    except OptionError as error:
        raise ConfigError(
            f"--resume {run}: expected a run of this command and version; go on with those that started it ({error})"
        ) from None


def claim(config: RunOptions, name: str) -> Path:
    """The directory to write into, runs/NAME unless given, locked until `explained` ends.

    OptionError for one that is another run's or another process's, holds what a run would replace, or is not writable.
    """
    check_place(config)
    try:
        return _begin(config, config.output_dir, name) if config.resume is None else _continue(config, config.resume)
    except OSError as error:
        where = f"--output-dir {config.output_dir or 'runs'}" if config.resume is None else f"--resume {config.resume}"
        raise OptionError(f"{where}: {error.strerror}") from None


def check_own(config: RunOptions, place: Path) -> None:
    """OptionError for an input, or the output, that is among what a run writes into this directory."""
    check_apart({"json": config.json, **config.inputs()}, place, OWN)


def check_place(config: RunOptions) -> None:
    """OptionError for a directory, of a new run or of one to resume, that models cannot be saved in."""
    option, place = ("output-dir", config.output_dir) if config.resume is None else ("resume", config.resume)
    check_utf8(option, place or Path("runs"))


def name_of(model: str) -> str:
    """What a run of this model is called: the last part of its name, and of a file the folder's that holds it.

    A GGUF file's own name says more.
    """
    if is_packed(model):
        return packed_name(model)
    path = Path(model)
    path = path.parent if path.is_file() else path
    return path.name or path.resolve().name


def record(config: RunOptions, place: Path, ranks: int = 1) -> None:
    """Writes run.json: from now on, the run can be resumed, with these options. ranks: of a new run.

    Raises ConfigError where what was prepared in the directory is not what the run began with.
    """
    path, files = place / RUN_FILE, hashes_of(place, *PREPARED)
    begun = read_sealed(path, BEGIN_ANOTHER) if path.exists() else {}
    for name, known in begun.get("files", {}).items():
        if files.get(name) != known:
            raise ConfigError(
                f"--resume {place}: {place / name} is not what the run began with: put it back; or remove it, to have "
                "it made anew, which is the same where --data and --max-steps are"
            )
    own = {"schema": SCHEMA, "id": uuid.uuid4().hex, "ranks": ranks, "files": files}
    write_sealed(path, {**own, **begun, "config": config.to_dict()})


def ranks_at_start(place: Path) -> int:
    """How many ranks with sequences of their own the run in this directory was started with."""
    return read_sealed(place / RUN_FILE, BEGIN_ANOTHER)["ranks"]


def _begin(config: RunOptions, wanted: Path | None, name: str) -> Path:
    """The directory of a new run: the one that is wanted, or the first free one of this name."""
    if wanted is not None:
        check_own(config, wanted)
        if why := _not_taken(wanted):
            raise OptionError(f"{why}, or choose another --output-dir")
        return wanted
    places = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(place for place in places if _is_apart(config, place) and not _not_taken(place))


def _is_apart(config: RunOptions, place: Path) -> bool:
    with suppress(OptionError):
        check_own(config, place)
        return True
    return False


def _not_taken(place: Path) -> str:
    """Takes a directory for a new run, or says why it cannot be taken and what to do."""
    if not (place / RUN_FILE).exists():
        place.mkdir(parents=True, exist_ok=True)
        begun = (place / LOCK_FILE).exists()  # by a process that was killed: what lies there is its own
        if not acquire(place):
            return f"{holder(place)} is writing to {place}: wait for its end"
        found = [] if begun else [path.name for name in WRITTEN for path in place.glob(name)]
        if not found and not (place / RUN_FILE).exists():
            return ""
        release(place)
        if found:
            return f"{place} holds {found[0]}, which a run would replace: move it elsewhere"
    return f"{place} holds a run already: --resume {place} continues it"


def _continue(config: RunOptions, run: Path) -> Path:
    before = stored(run, type(config)())
    check_own(config, run)
    if not acquire(run):
        raise OptionError(f"--resume {run}: {holder(run)} is writing there; wait for its end")
    with ExitStack() as unless_it_can_go_on:
        unless_it_can_go_on.callback(release, run)
        for name, value in config.to_dict().items():
            if name not in RESUMABLE and value != before.to_dict()[name]:
                option = f"--{name.replace('_', '-')}"
                raise OptionError(f"--resume {run}: {option} cannot change from {before.to_dict()[name]} to {value}")
        if other := strange_checkpoint(run):
            raise OptionError(f"--resume {run}: {strange(other)}")
        found = last_checkpoint(run)
        if found and min(found[1], _concluded_at(run)) >= config.max_steps:
            raise OptionError(f"--resume {run}: finished at step {found[1]}; raise --max-steps to train on")
        if found:
            check_whole(found[0])
        discard_unfinished(run)
        unless_it_can_go_on.pop_all()
    return run


def _concluded_at(run: Path) -> int:
    """The step after which the run's summary was written; 0 without one."""
    with suppress(DataError):
        return read_object(run / SUMMARY_FILE).get("steps", 0)
    return 0


@contextmanager
def explained(place: Path, command: str) -> Iterator[None]:
    """Turns an interruption and a full disk into one line that says how to go on; no whole checkpoint is lost.

    At its end, whichever that is, the directory is no longer locked.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(how_to_go_on(place, command)) from None
    except Exception as error:
        if not _disk_full(error, place):
            raise
        discard_unfinished(place)
        raise OutOfSpace(f"no space left at {place}: free some, then {how_to_go_on(place, command)}") from error
    finally:
        begun = not (place / RUN_FILE).exists() and any(any(place.glob(name)) for name in WRITTEN)
        release(place, keep_file=begun)


def how_to_go_on(place: Path, command: str) -> str:
    """The command that continues the run, and whence."""
    if not (place / RUN_FILE).exists():
        return "start again, nothing was trained yet"
    return f"{_launch(command)} --resume {place}{_trusting(place)} goes on from {whence(place)}"


def whence(place: Path) -> str:
    """Where a run that is resumed goes on."""
    found = last_checkpoint(place)
    finished = any(place.glob(f"*/{SUMMARY_FILE}"))  # runs of a comparison
    return f"step {found[1]}" if found else "what is not finished" if finished else "the start"


def _trusting(place: Path) -> str:
    """The flag without which a resumed run's own code would be refused."""
    try:
        return " --trust-config" if code_named(read_object(place / RUN_FILE)["config"]) else ""
    except (DataError, KeyError, AttributeError):
        return ""


def _launch(command: str) -> str:
    """The start of a command line that launches a command as this process was launched."""
    ranks, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks == 1:
        return f"logitless {command}"
    launcher = f"torchrun --nproc-per-node {ranks}" if here == ranks else "on every machine the same launch of"
    return f"{launcher} -m logitless.cli {command}"


def _disk_full(error: Exception, place: Path) -> bool:
    """torch and safetensors report a full disk as a RuntimeError and an error of their own, not always by name."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return True
    if "No space left" in str(error):
        return True
    cut_short = any(sign in str(error) for sign in CUT_SHORT)
    return cut_short and shutil.disk_usage(place).free < NEARLY_NOTHING
