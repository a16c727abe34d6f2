"""Files that appear whole or not at all."""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any

from ...errors import DataError, LogitlessError, OptionError, is_out_of_memory
from ...printable import is_utf8
from .space import NO_ROOM
from .written import OWN, RUN_FILE

TEMPORARY = ".tmp"
STREAMS = ("/dev/std", "/dev/fd/", "/proc/")  # open files by number: - is standard output
MADE_ANEW = "delete it, and --resume makes it anew"
OTHER_PICTURES = {".bmp", ".eps", ".gif", ".jpeg", ".jpg", ".pdf", ".ps", ".svg", ".tif", ".tiff", ".webp"}
MOST_OF_NAME = 40  # characters of a file's name that its temporary folder's begins with: names end at 255 bytes


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """The system's errors with the file's name, which they lack where a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` on a new path (file or directory) and puts the result in `path`'s place, a symlink's target.

    A device is written into. The new path lies in a folder of its own with a random name, which nobody else can enter.
    Raises OptionError for what is neither a file, a folder nor a device, and for a file in a folder's place.
    """
    place = target(path)
    if place.is_char_device():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder, place.name))
            with _named(path), Path(folder, place.name).open("rb") as made, place.open("wb", buffering=0) as device:
                shutil.copyfileobj(made, device)
        return
    folder = _beside(place)
    try:
        with _named(path):
            write(folder / place.name)
        if place.exists() and place.is_dir() != (folder / place.name).is_dir():
            raise OptionError(f"{path}: {'a folder' if place.is_dir() else 'a file'} lies there: move it elsewhere")
        if place.is_dir():
            os.replace(place, folder / ".previous")
        os.replace(folder / place.name, place)
    finally:
        shutil.rmtree(folder)


def remove_leftovers(path: Path) -> None:
    """Takes away what killed processes left of `path`, which nobody is writing now."""
    place = target(path)
    for folder in place.parent.glob(f"{glob.escape(_prefix(place))}*{TEMPORARY}"):
        shutil.rmtree(folder)


def remove_whole(place: Path) -> None:
    """Takes a folder or file away at once: what a kill leaves of it lies where `remove_leftovers` finds it."""
    folder = _beside(place)
    os.replace(place, folder / place.name)
    shutil.rmtree(folder)


def remove_all_leftovers(folder: Path, names: Iterable[str] = ("*",)) -> None:
    """Takes away what killed processes left in a folder of entries with these names, which nobody is writing now."""
    for name in names:
        for left in folder.glob(f".{name}.*{TEMPORARY}"):
            shutil.rmtree(left)


def target(path: Path) -> Path:
    """Where a file is really written: behind symlinks. OptionError for what is no file, folder or device there."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    except OSError as error:  # a circle of symlinks, a folder that is a file
        raise OptionError(f"{path}: {error.strerror}") from None
    stream = str(path).startswith(STREAMS) and not stat.S_ISCHR(mode)
    if stream or not (stat.S_ISCHR(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OptionError(f"{path}: expected a file to write, got a stream, a pipe, a socket or a disk")
    return Path(os.path.realpath(path))


def check_outputs(
    outputs: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, new_folders: bool = False
) -> None:
    """OptionError, before any work, for an output that cannot be written, is another one, an input, or a run's own.

    Paths (one, several or None) by the names of their options; `-`, of json alone, is standard output. new_folders:
    those that an output lies in are made when it is written.
    """
    places = [(name, path) for name, path in each_path(outputs) if (name, str(path)) != ("json", "-")]
    for name, path in places:
        if str(path) == "-":
            raise OptionError(f"--{name} -: expected a file to write; --json alone takes - for standard output")
        _check_writable(f"--{name}", path, new_folders)
        _check_no_runs(name, path)
        if name == "png" and path.suffix.lower() in OTHER_PICTURES:
            raise OptionError(f"--png {path}: expected a name that ends in .png, got {path.suffix}; it draws no other")
    files = [(f"--{name}", path, target(path)) for name, path in places if not path.is_char_device()]
    for (option, path, real), (other, _, same) in combinations(files, 2):
        if real == same:
            raise OptionError(f"{option} and {other} name one file, {path}: give each its own")
    for name, read in each_path(inputs or {}):
        for option, path, real in files:
            if _replaces(real, Path(read)):
                read_by = f"--{name.replace('_', '-')} {read}"
                raise OptionError(f"{option} {path} would overwrite what {read_by} reads: write elsewhere")


def each_path(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(option, path) of paths that are one, several or None each."""
    for name, paths in given.items():
        yield from ((name, path) for path in (paths if isinstance(paths, tuple) else (paths,)) if path is not None)


def _check_no_runs(name: str, path: Path) -> None:
    """OptionError for an output that is among what a run has written."""
    for place in (*path.absolute().parents, *Path(os.path.realpath(path)).parents):
        if os.path.exists(place / RUN_FILE):
            check_apart({name: path}, place, OWN)


def _replaces(path: Path, read: Path) -> bool:
    """Whether a file that is written is the one that is read, or one that lies below the folder that is read."""
    try:
        real = Path(os.path.realpath(read))
        return path.exists() and (real in (path, *path.parents) or (real.exists() and path.samefile(real)))
    except OSError:
        return False  # whoever reads it says what is wrong


@contextmanager
def folders_for(paths: Iterable[Path]) -> Iterator[None]:
    """Makes the folders that files are to lie in; after an error, those that are empty are taken away again.

    Without one they stay: a rank may have made them that ends before the one that writes there.
    """
    made: set[Path] = set()
    try:
        for path in paths:
            made |= {folder for folder in path.parents if not folder.exists()}
            path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in sorted(made, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # something lies there
                folder.rmdir()
        raise


def check_apart(given: Mapping[str, Any], folder: Path, names: Iterable[str]) -> None:
    """OptionError for a path, by the name of its option, that is or lies in what is written into a folder anyway.

    names: of the folder's entries, or patterns of them. Symlinks are followed; None and `-` are no paths.
    """
    here = Path(os.path.realpath(folder))
    own = {Path(os.path.realpath(entry)) for name in names for entry in folder.glob(name)}
    for name, path in given.items():
        if path is None or str(path) == "-":
            continue
        real = Path(os.path.realpath(path))
        first = real.relative_to(here).parts[:1] if real.is_relative_to(here) else ()
        if not own.isdisjoint((real, *real.parents)) or any(fnmatchcase(x, y) for x in first for y in names):
            given_as = f"--{name.replace('_', '-')} {path}"
            raise OptionError(f"{given_as} is among what the run itself writes into {folder}: name another place")


def check_no_folder(path: Path | None, folder: Path) -> None:
    """OptionError for a --json that is the folder which a run writes into, or one above it, before it is made."""
    if path is not None and str(path) != "-" and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path)):
        raise OptionError(f"--json {path}: expected a file, got the folder that the run writes into: name a file")


def check_utf8(option: str, path: Path) -> None:
    """OptionError for a place where models are saved whose name is not UTF-8: their libraries take no other."""
    if not is_utf8(os.path.realpath(path)):
        raise OptionError(
            f"--{option} {path}: expected a path in UTF-8, which models can be saved in, got "
            f"{os.path.realpath(path)}: choose another"
        )


def _check_writable(option: str, path: Path, new_folders: bool) -> None:
    try:
        place = target(path)
        if place.is_char_device():
            place.open("wb").close()
            return
        if place.is_dir():
            raise OptionError(f"{path} is a folder; name a file in it")
        if new_folders and not path.is_symlink() and not place.parent.exists():
            there = next(folder for folder in place.parents if folder.exists())
            if not (there.is_dir() and os.access(there, os.W_OK)):
                raise OptionError(f"{path}: no folder can be made in {there}; choose another")
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, place.name).touch()  # a name may be too long
            return
        if not place.parent.is_dir():
            folder = place.parent if path.is_symlink() else path.parent  # as it was given
            raise OptionError(f"{path}: the folder {folder} does not exist; make it first")
        folder = _beside(place)
        try:
            (folder / place.name).touch()  # a name may be too long
        finally:
            shutil.rmtree(folder)
    except OptionError as error:
        raise OptionError(f"{option} {error}") from None
    except OSError as error:
        raise OptionError(f"{option} {path}: {error.strerror}") from None


def _beside(place: Path) -> Path:
    """A new folder beside a file, on the same disk, which its owner alone can enter."""
    return Path(tempfile.mkdtemp(prefix=_prefix(place), suffix=TEMPORARY, dir=place.parent))


def _prefix(place: Path) -> str:
    return f".{place.name[:MOST_OF_NAME]}."


def arrow_file(path: Path, mode: str = "rb") -> Any:
    """A file that pyarrow reads or writes, whatever its name: by itself it takes none that is not UTF-8."""
    import pyarrow as pa

    return pa.OSFile(os.fsencode(path), mode)


def write_table(path: Path, table: Any, **how: Any) -> None:
    """An arrow table as a parquet file; how: what pyarrow's `write_table` takes."""
    from pyarrow.parquet import write_table

    with arrow_file(path, "wb") as file:
        write_table(table, file, **how)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, whole or not at all."""
    write_text(path, strict_json(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """`text` as UTF-8, whole or not at all; half a surrogate pair, as of a file's name, is written as an escape."""
    write_whole(path, lambda temporary: _write_text(temporary, text))


def strict_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON that any reader takes: null where a number is NaN or infinite, for which JSON has no words."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: finite(y) for name, y in x.items()}
        if isinstance(x, list | tuple):
            return [finite(y) for y in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(value), indent=indent, allow_nan=False)


@contextmanager
def readable(path: Path, remedy: str = MADE_ANEW) -> Iterator[None]:
    """DataError, with what to do, for whatever reading a file or folder of ours raises that was damaged since."""
    try:
        check_ends(path)
        yield
    except LogitlessError:
        raise
    except Exception as error:  # json, numpy, torch, safetensors, transformers and who takes what they return
        if is_out_of_memory(error) or getattr(error, "errno", None) in NO_ROOM:
            raise
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DataError(f"{path} does not hold what was written there ({why}): {remedy}") from None


def check_ends(path: Path) -> None:
    """ValueError for what may never end, or wait for a writer forever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError("expected a file, got a device or a pipe")


def parsed(path: Path) -> Any:
    """The JSON of a file; ValueError or OSError for a file that is none, nested too deeply, or a device."""
    check_ends(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(path: Path, remedy: str = MADE_ANEW) -> dict[str, Any]:
    """The object that `write_json` wrote; DataError, with what to do, for anything else."""
    with readable(path, remedy):
        found = parsed(path)
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, got {type(found).__name__}")
        return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; a last line that a killed process left unfinished is not one of them.

    Raises DataError for any other line that is not a record.
    """
    if not path.exists():
        return []
    with readable(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [_record(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.endswith("\n")]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """All records as a JSON-lines file, whole or not at all."""
    write_text(path, "".join(strict_json(r) + "\n" for r in records))


def append_line(path: Path, record: dict[str, Any]) -> None:
    """One more record, in a single write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(strict_json(record) + "\n")


def _record(line: str, where: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict):
            return record
    raise DataError(f"{where}: expected a record in JSON, got a damaged line; remove it")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
