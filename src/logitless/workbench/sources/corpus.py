"""Documents of a corpus: text files, jsonl, parquet, a `datasets` directory, or this Python; and passages of them."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn
from zoneinfo import ZoneInfoNotFoundError

from ...errors import DataError, LogitlessError
from ...units import plural
from ..common.files import arrow_file, parsed
from ..common.written import no_text_beside
from .tokenizer import TextTokenizer

TEXT_FIELDS = ("text", "content")
CHAT_FIELDS = ("messages", "prompt", "completion", "tools")
_REMEDIES = {  # by what is no text in a message, and what it is
    ("content", "list"): "; write its parts as one text",
    ("content", "null"): "; only a message with tool_calls may be without",
}
CHATS_ALONE = "conversations are read from one .jsonl or .parquet file or datasets directory, with no text among them"
TABLES = (".csv", ".tsv")  # that `datasets` and pandas read, and nothing here does
LONGEST_ROW = 2**20  # characters of a .json file, among which its first row is looked for
NO_ZONE = "The zoneinfo module or pytz"  # what newer pyarrow says is missing where it does not know a time zone
# What Python has no value for: bytes that are no text, a date after the year 9999, a time zone.
NO_VALUE = ValueError, OverflowError, ZoneInfoNotFoundError
SHORTEST = 4  # tokens of a prompt or continuation that is worth having
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

Row = dict[str, Any]  # prompt and continuation; a table's own columns
Remark = Callable[[str], None]


def ignored(what: str) -> None:
    """The `Remark` of who has nowhere to say it."""


def is_arrow(path: Path) -> bool:
    """Whether it is a directory that `datasets` wrote."""
    return any((path / name).exists() for name in ("dataset_dict.json", "state.json"))


def ending(path: Path) -> str:
    """What a file is read by: .JSONL is .jsonl."""
    return path.suffix.lower()


def documents(data: str | None, remark: Remark = ignored) -> tuple[Iterator[str], Iterator[str] | None]:
    """(documents to train on, documents held out or None when the source names none).

    data: None for the running interpreter's own standard library, or the path of a text file, a folder of files,
    a .jsonl, a .parquet, or a directory written by `datasets`' `save_to_disk`. remark: hears, where all are read, what
    was left out: rows of null, files of a folder that are no text. Raises DataError, here for a path that is not there
    and while reading for a file that cannot be read.
    """
    if data is None:
        return standard_library(), None
    path = Path(data)
    if not path.exists():
        raise DataError(f"--data {data}: no such file or directory")
    if path.is_file():
        return _file(path, remark), None
    if not path.is_dir():
        raise DataError(f"--data {data}: expected a file or a folder, got a device or a pipe; write it to a file")
    if is_arrow(path):
        return _datasets_directory(path, remark)
    return _folder(path, remark), None


def check_one_text(path: Path) -> None:
    """DataError for what would be one text with its commas or braces: a table, or a .json file of objects."""
    if ending(path) in TABLES and path.is_file():
        raise DataError(
            f"--data {path}: expected a text, got a table, which is read from .parquet or .jsonl files with named "
            "columns: write it so, or name the file .txt where it is the text"
        )
    if ending(path) != ".json" or not path.is_file():
        return
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST_ROW).lstrip()
        rows = text.removeprefix("[").lstrip()
        row, end = json.JSONDecoder().raw_decode(rows)
    except (OSError, ValueError, RecursionError):
        return  # whoever reads it as a text says what is wrong with that
    if isinstance(row, dict) and (text.startswith("[") or rows[end:].lstrip().startswith("{")):
        raise DataError(
            f"--data {path}: expected a text, got JSON objects, which are read from .jsonl files, one in each line: "
            "write them so, or name the file .txt where they are the text"
        )


def files_below(root: Path, written: tuple[Path, ...] = ()) -> list[Path]:
    """The files of a folder that hold its text, in the order of their names.

    Not those that are hidden, nor what is `written`, nor what runs write into their directories: what else lies there
    is text. Raises DataError for a folder that cannot be read.
    """
    files = sorted(_files(root))
    left_out: dict[Path, set[str]] = {}
    for path in files:
        if names := no_text_beside(path):
            left_out.setdefault(path.parent, set()).update(names)
    here, real = root.absolute(), root.resolve()
    out = {place for path in written for place in (path.absolute(), path.resolve())}

    def is_document(path: Path) -> bool:
        name = path.relative_to(root)
        if any(part.startswith(".") for part in name.parts):
            return False
        if out and not out.isdisjoint((here / name, *(here / name).parents, real / name, *(real / name).parents)):
            return False
        of_runs = [folder for folder in path.parents if folder in left_out] if left_out else []
        return not any(
            fnmatchcase(path.relative_to(folder).parts[0], entry) for folder in of_runs for entry in left_out[folder]
        )

    return [path for path in files if is_document(path)]


def _files(root: Path) -> Iterator[Path]:
    """The files below a folder, but for those in hidden ones."""

    def refuse(error: OSError) -> NoReturn:  # of a folder, which rglob would leave out without a word
        raise DataError(f"--data {error.filename}: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for path in (Path(folder, name) for name in names) if path.is_file())


def standard_library() -> Iterator[str]:
    """The *.py files of the interpreter's standard library, without its tests, in one order on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]  # packages have many times its files
        files += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    for name in sorted(files):
        if text := _text_or_none(root / name):
            yield text


def passages(text: str, tokenizer: TextTokenizer, prompt: int, continuation: int) -> list[Row]:
    """Whole lines of a document as (prompt, what really follows), of at most these many tokens; none is in two."""
    lines = text.splitlines(keepends=True)
    sizes = [len(ids) for ids in tokenizer.encode(lines)] if lines else []
    found: list[Row] = []
    begin = 0
    while begin < len(lines):
        middle = _reach(sizes, begin, prompt)
        end = _reach(sizes, middle, continuation)
        if sum(sizes[begin:middle]) >= SHORTEST and sum(sizes[middle:end]) >= SHORTEST:
            found.append({"prompt": "".join(lines[begin:middle]), "continuation": "".join(lines[middle:end])})
        begin = max(end, begin + 1)
    return [row for row in found if row["prompt"].strip() and row["continuation"].strip()]


def _reach(sizes: list[int], begin: int, most: int) -> int:
    """The end of the lines from `begin` that have at most `most` tokens together."""
    end, total = begin, 0
    while end < len(sizes) and total + sizes[end] <= most:
        total += sizes[end]
        end += 1
    return end


def json_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of each line of a .jsonl file. Raises DataError."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _json_record(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"--data {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"--data {path}: not UTF-8 text") from None


def table(
    data: str | None, wanted: Callable[[list[str]], list[str]] = list
) -> tuple[Iterable[Row], Iterable[Row] | None] | None:
    """(rows, held-out rows or None) of a jsonl or parquet file or a `datasets` directory; None for other data.

    wanted: which of a table's columns are read, none where it is other data; a jsonl file's lines are read whole.
    Raises DataError, of a jsonl file's lines while they are read.
    """
    path = Path(data or ".")
    if data is None or not path.exists():
        return None  # `documents` knows what to say
    if ending(path) == ".jsonl" and path.is_file():
        return (record for _, record in json_records(path)), None
    if ending(path) == ".parquet" and path.is_file():
        columns = wanted(_parquet_columns(path))
        return (_parquet_rows(path, columns), None) if columns else None
    if is_arrow(path):
        train, held = splits(path)
        if columns := wanted(train.column_names):
            return _arrow_table(train, columns, path), None if held is None else _arrow_table(held, columns, path)
    return None


def is_chat(columns: Iterable[str]) -> bool:
    """Whether rows with these columns are conversations: `messages`, or `prompt` and `completion`, and no text."""
    names = set(columns)
    return names.isdisjoint(TEXT_FIELDS) and ("messages" in names or {"prompt", "completion"} <= names)


def chat_columns(names: Collection[str]) -> list[str]:
    """Those of a table's columns that a conversation is made of; none where its rows are no conversations."""
    return [name for name in CHAT_FIELDS if name in names] if is_chat(names) else []


def text_field(names: Collection[str]) -> str | None:
    """Which of a row's fields, or of a table's columns, holds its text."""
    return next((name for name in TEXT_FIELDS if name in names), None)


def unsaid(value: Any, text: bool = True) -> str:
    """Why it is neither messages nor, where that will do, text; nothing where it is one of them.

    A message has a role and a content of text, or calls tools and may be without content.
    """
    if text and isinstance(value, str):
        return ""
    if not isinstance(value, list):
        return f"expected {'text, or ' * text}messages in a list, got {_kind(value)}"
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            return f"message {i}: expected an object with role and content, got {_kind(message)}"
        calls = message.get("content") is None and message.get("tool_calls")
        for name in ("role",) if calls else ("role", "content"):
            if not isinstance(message.get(name), str):
                got = _kind(message[name]) if name in message else "none"
                return f"message {i}: {name} must be text, got {got}{_REMEDIES.get((name, got), '')}"
    return ""


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def splits(path: Path) -> tuple[Any, Any]:
    """(train, held out or None): the datasets of a directory that `save_to_disk` wrote. Raises DataError."""
    from datasets import Dataset, DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:  # datasets raises whatever its parsers do; all of it means an unreadable directory
        why = _without_rows(path) or f"not a readable datasets directory ({first_line(error)})"
        raise DataError(f"--data {path}: {why}") from None
    if isinstance(loaded, Dataset):
        return loaded, None
    if not isinstance(loaded, DatasetDict) or "train" not in loaded:
        raise DataError(f"--data {path}: expected a split named train, got {', '.join(map(str, loaded)) or 'none'}")
    return loaded["train"], next((loaded[name] for name in ("validation", "test") if name in loaded), None)


def _without_rows(path: Path) -> str:
    """Which part of a directory has no rows, which `datasets` writes but does not read; nothing where all have some."""
    for state in (path / "state.json", *sorted(path.glob("*/state.json"))):
        with suppress(OSError, ValueError, TypeError, KeyError):  # of one that is not there, or damaged
            if parsed(state)["_data_files"] == []:
                split = "" if state.parent == path else f"the split {state.parent.name}: "
                return f"{split}no rows in it; give it some, or leave it out"
    return ""


@contextmanager
def readable_rows(path: Path, what: str) -> Iterator[None]:
    """DataError for what arrow raises while it reads the rows of `what` lies at a path."""
    import pyarrow as pa

    try:
        yield
    except LogitlessError:
        raise
    except UnicodeDecodeError:
        raise DataError(f"--data {path}: expected text in UTF-8, got other bytes; write it in UTF-8") from None
    except (OSError, *NO_VALUE, pa.ArrowException) as error:
        raise DataError(f"--data {path}: not a readable {what} ({first_line(error)})") from None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if isinstance(error, ZoneInfoNotFoundError) or (lines and NO_ZONE in lines[0]):
        return "a time zone that is not known here; write the times in another, or pip install tzdata"
    return lines[0] if lines else type(error).__name__


def why_not_json(error: ValueError | RecursionError) -> str:
    """What `json` says of a line that it does not read."""
    return "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", first_line(error))


def _file(path: Path, remark: Remark) -> Iterator[str]:
    if ending(path) == ".jsonl":
        return _jsonl(path)
    if ending(path) == ".parquet":
        return _parquet(path, remark)
    check_one_text(path)
    text = _text_or_none(path)
    if text is None:
        raise DataError(f"--data {path}: not UTF-8 text, or with NUL bytes; expected a text, .jsonl or .parquet file")
    return iter([text])


def _folder(root: Path, remark: Remark) -> Iterator[str]:
    """The documents of every readable file of a folder; binary files are none."""
    found, strange = False, 0
    for path in files_below(root):
        if ending(path) in (".jsonl", ".parquet"):
            found = True
            yield from _file(path, remark)
        elif text := _text_or_none(path):
            found = True
            yield text
        else:
            strange += text is None
    if not found:
        raise DataError(f"--data {root}: no text, .jsonl or .parquet file in this folder")
    if strange:
        remark(f"{root}: {plural(strange, 'file')} that {'is' if strange == 1 else 'are'} not UTF-8 text: left out")


def _text_or_none(path: Path) -> str | None:
    """A file's text, or None when it is binary; DataError when it cannot be opened."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(f"--data {path}: {error.strerror}") from None
    return None if "\0" in text else text


def _jsonl(path: Path) -> Iterator[str]:
    return (_text_of(record, where) for where, record in json_records(path))


def _json_record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if "\\ud" in line.lower():  # an escape of half a character, which is JSON and no text
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"--data {where}: expected text, got half of a surrogate pair (an escape \\ud800 to \\udfff alone); "
            "remove it or write \\ufffd"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"--data {where}: not JSON ({why_not_json(error)}); expected one object per line") from None
    if not isinstance(record, dict):
        raise DataError(f"--data {where}: expected an object with fields, got {type(record).__name__}")
    return record


def _text_of(record: dict[str, Any], where: str) -> str:
    name = _text_column(list(record), where)
    if not isinstance(record[name], str):
        raise DataError(f"--data {where}: field {name!r} must be text, got {type(record[name]).__name__}")
    return record[name]


def _text_column(columns: Iterable[str], where: str) -> str:
    names = list(columns)
    if name := text_field(names):
        return name
    remedy = f"; {CHATS_ALONE}" if is_chat(names) else ""
    expected = f"expected a field named {' or '.join(TEXT_FIELDS)}, got {', '.join(names) or 'none'}"
    raise DataError(f"--data {where}: {expected}{remedy}")


def _parquet(path: Path, remark: Remark) -> Iterator[str]:
    import pyarrow.parquet as pq

    with readable_rows(path, "parquet file"), pq.ParquetFile(arrow_file(path)) as file:
        columns = file.schema_arrow.names
        if is_chat(columns) and not file.metadata.num_rows:
            raise DataError(f"--data {path}: no rows in it: expected conversations, one or more")
        column = _text_column(columns, str(path))
        batches = file.iter_batches(batch_size=256, columns=[column])
        yield from _strings((batch.column(0).to_pylist() for batch in batches), column, path, remark)


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    with readable_rows(path, "parquet file"), pq.ParquetFile(arrow_file(path)) as file:
        return file.schema_arrow.names


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with readable_rows(path, "parquet file"), pq.ParquetFile(arrow_file(path)) as file:
        for batch in file.iter_batches(batch_size=256, columns=columns):
            yield from batch.to_pylist()


def _arrow_table(dataset: Any, columns: list[str], path: Path) -> Iterator[Row]:
    there = [name for name in columns if name in dataset.column_names]
    return arrow_rows(map(dict, dataset.select_columns(there)), path)


def arrow_rows(rows: Iterable[Any], path: Path) -> Iterator[Any]:
    """The rows of a `datasets` directory. Raises DataError where they cannot be read."""
    with readable_rows(path, "datasets directory"):
        yield from rows


def _strings(batches: Iterable[list[Any]], column: str, path: Path, remark: Remark) -> Iterator[str]:
    rows = nulls = 0
    for value in chain.from_iterable(batches):
        rows += 1
        if value is None:
            nulls += 1
        elif isinstance(value, str):
            yield value
        else:
            raise DataError(f"--data {path}: column {column!r} must be text, got {type(value).__name__}")
    if nulls:
        remark(f"{path}: {nulls:,} of {plural(rows, 'row')} without text (null): left out")


def _datasets_directory(path: Path, remark: Remark) -> tuple[Iterator[str], Iterator[str] | None]:
    train, held_out = splits(path)
    return _rows(train, path, remark), None if held_out is None else _rows(held_out, path, remark)


def _rows(dataset: Any, path: Path, remark: Remark) -> Iterator[str]:
    column = _text_column(dataset.column_names, str(path))
    batches = dataset.select_columns([column]).iter(batch_size=256)
    return arrow_rows(_strings((batch[column] for batch in batches), column, path, remark), path)
