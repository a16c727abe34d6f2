"""The directory of a run: a new one for a new run, the old one for a resumed run, and what the run began with."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

from ...errors import ConfigError, DataError, OptionError
from ..common.files import (
    check_apart,
    check_no_folder,
    check_utf8,
    parsed,
    read_lines,
    read_object,
    readable,
    remove_all_leftovers,
    remove_whole,
    write_text,
)
from ..common.lock import LOCK_FILE, acquire, holder, release
from ..common.options import RESUMABLE, Options, RunOptions, from_dict
from ..common.sealed import hashes_of, read_sealed, write_sealed
from ..common.space import room_wanted
from ..common.written import METRICS_FILE, OWN, PREPARED, RUN_FILE, SUMMARY_FILE, TABLES, WRITTEN
from ..sources.converted import is_packed, packed_name
from .checkpoints import check_whole, discard_unfinished, last_checkpoint, strange, strange_checkpoint

SCHEMA = 2  # of run.json
BEGIN_ANOTHER = "put back what was there, or begin another run"


def stored(run: Path, default: Options) -> Options:
    """The options that the run in this directory was started with, of the default's kind.

    Raises ConfigError where there is none, DataError where its file is damaged.
    """
    path = run / RUN_FILE
    if not path.exists():
        remedy = f"; if no process is writing there, start it again with --output-dir {quote(str(run))}"
        begun = (run / LOCK_FILE).exists()  # by a process that was killed, or that is about to write the rest
        raise ConfigError(f"--resume {run}: no run in this directory (expected {RUN_FILE}){remedy if begun else ''}")
    with readable(path, BEGIN_ANOTHER):
        schema = parsed(path).get("schema")
    try:
        if schema != SCHEMA:
            raise OptionError(f"{RUN_FILE} has schema {schema}, expected {SCHEMA}")
        begun = read_sealed(path, BEGIN_ANOTHER)
        _check_directory(run, begun)
        return from_dict(begun["config"], RUN_FILE, default)
    except OptionError as error:
        raise ConfigError(
            f"--resume {run}: expected a run of this command and version; go on with those that started it ({error})"
        ) from None


def _check_directory(run: Path, begun: dict[str, Any]) -> None:
    """ConfigError for a model's folder that was given relative to another directory: here it would be a hub id."""
    model, there = begun["config"].get("model"), begun.get("directory")
    if isinstance(model, str) and isinstance(there, str) and not Path(model).exists() and Path(there, model).exists():
        raise ConfigError(f"--resume {run}: its --model {model} is in {there}, where the run began: go on from there")


def claim(config: RunOptions, name: str) -> Path:
    """The directory to write into, runs/NAME unless given, locked until `explained` ends.

    OptionError for one that is another run's or another process's, holds what a run would replace, or is not writable.
    """
    check_place(config)
    try:
        return _begin(config, config.output_dir, name) if config.resume is None else _continue(config, config.resume)
    except OSError as error:
        option, place = _given(config)
        why = "expected a folder, got a file" if isinstance(error, FileExistsError) else error.strerror
        raise OptionError(f"--{option} {place}: {room_wanted(error, place) or why}") from None


def check_own(config: RunOptions, place: Path) -> None:
    """OptionError for an input, or the output, that is among what a run writes into this directory."""
    check_apart({"json": config.json, **config.inputs()}, place, OWN)
    check_no_folder(config.json, place)


def check_place(config: RunOptions) -> None:
    """OptionError for a directory, of a new run or of one to resume, that models cannot be saved in."""
    check_utf8(*_given(config))


def _given(config: RunOptions) -> tuple[str, Path]:
    """(option, place) that say where the run is to write."""
    return ("output-dir", config.output_dir or Path("runs")) if config.resume is None else ("resume", config.resume)


def name_of(model: str) -> str:
    """What a run of this model is called: the last part of its name, of a config.json the folder's that holds it.

    A GGUF file's own name says more, and so does a configuration's of another name.
    """
    if is_packed(model):
        return packed_name(model)
    path = Path(model)
    if path.is_file():
        if path.name != "config.json":
            return path.stem
        path = path.parent
    return path.name or path.resolve().name


def record(config: RunOptions, place: Path, ranks: int = 1, inputs: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes run.json: from now on, the run can be resumed, with these options. ranks: of a new run.

    inputs: what tells what is read beside the data, by its options, from all others. Raises ConfigError where one of
    them, or what was prepared in the directory, is not what the run began with.
    """
    files, begun = hashes_of(place, PREPARED), _begun(place)
    for name, known in begun.get("inputs", {}).items():
        if inputs.get(name) != known:
            raise ConfigError(
                f"--resume {place}: {name} is not what the run began with: put it back, or begin another run"
            )
    for name, known in begun.get("files", {}).items():
        if files.get(name) != known:
            raise ConfigError(
                f"--resume {place}: {place / name} was made anew, and is not what the run began with: give the --data "
                "and the model that it was made of, put back the file, or begin another run"
            )
    own = {"schema": SCHEMA, "id": uuid.uuid4().hex, "ranks": ranks, "max_steps": config.max_steps}
    own |= {"files": files, "inputs": dict(inputs), "directory": os.getcwd()}
    write_sealed(place / RUN_FILE, {**own, **begun, "config": config.to_dict()})


@contextmanager
def options_kept(place: Path) -> Iterator[None]:
    """Puts run.json back as it was where what follows refuses the options that it has since.

    A checkpoint that was made with them keeps them. A new run that has measured nothing yet is taken away.
    """
    path, found = place / RUN_FILE, last_checkpoint(place)
    before = path.read_text(encoding="utf-8") if path.exists() else None
    try:
        yield
    except (OptionError, ConfigError, DataError):
        if last_checkpoint(place) == found:
            if before is not None:
                write_text(path, before)
            elif not read_lines(place / METRICS_FILE):  # so that other options can begin here
                path.unlink(missing_ok=True)
                _remove_prepared(place)
        raise


def ranks_at_start(place: Path) -> int:
    """How many ranks with sequences of their own the run in this directory was started with."""
    return _begun(place)["ranks"]


def as_begun(config: Options, place: Path) -> Options:
    """The options by which the run's prompts or pairs were made: by now it may take more steps."""
    return replace(config, max_steps=_begun(place).get("max_steps", config.max_steps))


def prepared_for(place: Path) -> dict[str, str]:
    """The hashes of what was prepared before the run in this directory began."""
    return _begun(place)["files"]


def finished_within(whole: Path) -> dict[str, dict[str, str]]:
    """The hashes of what each finished run of a comparison left, by the name of its directory."""
    return _begun(whole).get("finished", {})


def record_finished(whole: Path, name: str, files: dict[str, str]) -> None:
    """Writes into a comparison's run.json what one of its runs left, which is compared from now on."""
    begun = _begun(whole)
    write_sealed(whole / RUN_FILE, {**begun, "finished": {**begun.get("finished", {}), name: files}})


def differing(before: RunOptions, now: RunOptions) -> dict[str, tuple[Any, Any]]:
    """The options in which two runs differ, and what each goes by; one that is given as it would be anyway is none."""
    given = now.to_dict()
    names = (name for name, value in before.to_dict().items() if given[name] != value)
    values = {name: (before.value_of(name), now.value_of(name)) for name in names}
    return {name: (was, is_now) for name, (was, is_now) in values.items() if was != is_now}


def _begun(place: Path) -> dict[str, Any]:
    """What run.json says of the run in this directory; empty where none has begun."""
    path = place / RUN_FILE
    return read_sealed(path, BEGIN_ANOTHER) if path.exists() else {}


def _check_prepared(run: Path) -> None:
    """ConfigError where what the run goes on with is not what it began with; what is gone as a whole is made anew."""
    known = {name: was for name, was in _begun(run)["files"].items() if (run / Path(name).parts[0]).exists()}
    found = hashes_of(run, PREPARED)
    for name in sorted(known | found):
        if known.get(name) != found.get(name):
            raise ConfigError(
                f"--resume {run}: {run / name} is not what the run began with: put it back; or remove "
                f"{run / Path(name).parts[0]}, to have it made anew"
            )


def _begin(config: RunOptions, wanted: Path | None, name: str) -> Path:
    """The directory of a new run: the one that is wanted, or the first free one of this name."""
    if wanted is not None:
        check_own(config, wanted)
        if why := _not_taken(wanted):
            raise OptionError(f"{why}, or choose another --output-dir")
        return wanted
    check_no_folder(config.json, Path("runs"))
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
        made = [folder for folder in (place, *place.parents) if not folder.exists()]
        place.mkdir(parents=True, exist_ok=True)
        begun = (place / LOCK_FILE).exists()  # by a process that was killed: what lies there is its own
        if not begun and (found := [path.name for name in WRITTEN for path in place.glob(name)]):
            return f"{place} holds {found[0]}, which a run would replace: move it elsewhere"
        if not acquire(place, made):
            return f"{holder(place)} is writing to {place}: wait for its end"
        if not (place / RUN_FILE).exists():
            _remove_prepared(place)
            return ""
        release(place)
    return f"{place} holds a run already: --resume {place} continues it"


def _remove_prepared(place: Path) -> None:
    """Takes away what was written for a run that never began or was refused, maybe by other options."""
    remove_all_leftovers(place, OWN)
    for path in (place / name for name in (*PREPARED, *TABLES)):
        if path.exists():
            remove_whole(path)


def _continue(config: RunOptions, run: Path) -> Path:
    before = stored(run, type(config)())
    check_own(config, run)
    if not acquire(run):
        raise OptionError(f"--resume {run}: {holder(run)} is writing there; wait for its end")
    with ExitStack() as unless_it_can_go_on:
        unless_it_can_go_on.callback(release, run)
        for name, (was, now) in differing(before, config).items():
            if name not in RESUMABLE:
                raise OptionError(f"--resume {run}: --{name.replace('_', '-')} cannot change from {was} to {now}")
        if other := strange_checkpoint(run):
            raise OptionError(f"--resume {run}: {strange(other)}")
        found = last_checkpoint(run)
        if found and min(found[1], _concluded_at(run)) >= config.max_steps:
            raise OptionError(f"--resume {run}: finished at step {found[1]}; raise --max-steps to train on")
        if found:
            check_whole(found[0])
        _check_prepared(run)
        discard_unfinished(run)
        unless_it_can_go_on.pop_all()
    return run


def _concluded_at(run: Path) -> int:
    """The step after which the run's summary was written; 0 without one."""
    with suppress(DataError):
        return read_object(run / SUMMARY_FILE).get("steps", 0)
    return 0
