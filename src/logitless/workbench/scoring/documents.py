"""Documents to score, piece by piece, from files of any size; what cannot be read is said and passed over."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...hashes import hash_of
from ...printable import is_utf8
from ..common.files import arrow_file
from ..sources.corpus import (
    NO_VALUE,
    TEXT_FIELDS,
    Row,
    arrow_rows,
    chat_columns,
    check_one_text,
    ending,
    first_line,
    is_arrow,
    is_chat,
    splits,
    text_field,
    why_not_json,
)
from ..sources.identity import text_files

PIECE = 1 << 17  # characters of a document that are held and tokenised at a time
NAMES = f"{', '.join(TEXT_FIELDS)} or messages"
HALF = "not valid Unicode (a lone surrogate)"
LEAD = 16  # characters kept before a piece, for each token of context


@dataclass(frozen=True)
class Piece:
    """Some text of a document, a whole `chat`, or the `problem` for which it is skipped; `lead` is the text before."""

    document: int
    name: str  # file, or file:line
    text: str = ""
    lead: str = ""
    problem: str = ""
    chat: Row | None = None
    done: float = 0.0  # the share of the whole input that has been read


@dataclass
class Documents:
    """The documents below a path, in one order on every machine, as pieces of at most `PIECE` characters.

    A longer document is cut behind a line's end where there is one, and each piece but the first has the `context`
    tokens' worth of text before it as its lead. What is `written` below the path, or below such a folder, is no
    document. Raises DataError where the path does not exist.
    """

    path: Path
    context: int
    written: tuple[Path, ...] = ()
    files: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise DataError(f"--data {self.path}: no such file or directory")
        check_one_text(self.path)
        self.arrow = is_arrow(self.path)
        self.files = [self.path] if self.arrow else text_files(self.path, self.written)

    def contents(self) -> dict[str, tuple[int, str]]:
        """Bytes of each file, and a hash of them: where they change, an unfinished run does not go on."""
        files = text_files(self.path) if self.arrow else self.files
        return {str(f): (f.stat().st_size, hash_of(f)) for f in files if f.is_file()}

    def __iter__(self) -> Iterator[Piece]:
        sizes = [f.stat().st_size for f in self.files]
        total, before, number = max(1, sum(sizes)), 0, -1
        for file, size in zip(self.files, sizes, strict=True):
            done = before / total
            for name, share, document in self._of(file):
                number += 1
                begin, done = done, (before + share * size) / total
                for piece, part in self._pieces(number, name, document, max(1, (done - begin) * total)):
                    yield replace(piece, done=begin + min(1.0, part) * (done - begin))
            before += size

    def _of(self, file: Path) -> Iterator[tuple[str, float, Any]]:
        """(name, share of the file that is read, the document: text, parts of a text, or a Problem)."""
        if self.arrow:
            return arrow_rows(_table_rows(_datasets(file), str(file)), file)
        if ending(file) == ".jsonl":
            return _jsonl(file)
        if ending(file) == ".parquet":
            return _parquet(file)
        return iter([(str(file), 1.0, _text(file))])

    def _pieces(self, number: int, name: str, document: Any, size: float) -> Iterator[tuple[Piece, float]]:
        """The pieces of a document of about `size` bytes, with the share of it that they reach."""
        if isinstance(document, Chat):
            yield Piece(number, name, chat=document.row), 1.0
            return
        problem = _problem(document)
        if problem:
            yield Piece(number, name, problem=problem), 1.0
            return
        lead, rest, read = "", "", 0
        for part in [document] if isinstance(document, str) else document:
            rest += part
            while len(rest) > PIECE:
                cut = _cut(rest)
                read += cut
                yield Piece(number, name, rest[:cut], lead), read / size
                lead, rest = (lead + rest[:cut])[-LEAD * self.context :], rest[cut:]
        if rest or not read:
            yield Piece(number, name, rest, lead, "" if rest else "empty"), 1.0


def _cut(text: str) -> int:
    """Where a piece ends: behind a line's end, or before a space, or where it must."""
    return 1 + text.rfind("\n", 0, PIECE) or max(0, text.rfind(" ", 0, PIECE)) or PIECE


@dataclass(frozen=True)
class Chat:
    """A document that is a conversation, as a row of a table."""

    row: Row


@dataclass(frozen=True)
class Problem:
    """A document that is none."""

    why: str


def _problem(document: Any) -> str:
    if isinstance(document, Problem):
        return document.why
    if document is None:
        return "null in the place of text"
    if isinstance(document, str):
        return "" if is_utf8(document) else HALF
    return "" if isinstance(document, Iterator) else f"{type(document).__name__} in the place of text"


def _text(path: Path) -> Iterator[str] | Problem:
    """A text file's parts. It is read twice, so that a file which is not text gives no rows at all."""
    try:
        for part in _parts(path):
            if "\0" in part:
                return Problem("not text (it holds NUL bytes)")
    except UnicodeDecodeError:
        return Problem("not UTF-8 text")
    except OSError as error:
        return Problem(f"cannot be read ({error.strerror})")
    return _parts(path)


def _parts(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with path.open("rb") as file:
        while block := file.read(PIECE):
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)


def _jsonl(path: Path) -> Iterator[tuple[str, float, Any]]:
    try:
        size, read = max(1, path.stat().st_size), 0
        with path.open("rb") as file:
            lines = (line for block in file for line in block.splitlines(keepends=True))  # also behind a CR alone
            for number, line in enumerate(lines, 1):
                read += len(line)
                if line.strip():
                    yield f"{path}:{number}", read / size, _json_text(line)
    except OSError as error:
        yield str(path), 1.0, Problem(f"cannot be read ({error.strerror})")


def _json_text(line: bytes) -> Any:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Problem("not UTF-8 text")
    except (ValueError, RecursionError) as error:
        return Problem(f"not JSON ({why_not_json(error)})")
    if not isinstance(record, dict):
        return Problem(f"{type(record).__name__} in the place of an object")
    if is_chat(record):
        return Chat(record) if is_utf8(json.dumps(record, ensure_ascii=False)) else Problem(HALF)
    name = text_field(record)
    return Problem(f"no field named {NAMES}") if name is None else record[name]


def _parquet(path: Path) -> Iterator[tuple[str, float, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(arrow_file(path)) as file:
            names = file.schema_arrow.names
            name, chats = text_field(names), chat_columns(names)
            if name is None and not chats:
                yield str(path), 1.0, Problem(f"no column named {NAMES}")
                return
            for batch in file.iter_batches(batch_size=64, columns=chats or [name]):
                for value in _chats(batch) if chats else map(_scalar, batch.column(0)):
                    row += 1
                    yield f"{path}:{row}", row / file.metadata.num_rows, value
    except (OSError, pa.ArrowException) as error:
        where = f"{path}:{row + 1}" if row else str(path)
        yield where, 1.0, Problem(f"not readable as parquet from here on ({first_line(error)[:120]})")


def _chats(batch: Any) -> Iterator[Chat | Problem]:
    """The rows of an arrow table, one by one: what is no text in one is not the others' problem."""
    for row in range(batch.num_rows):
        try:
            yield Chat(batch.slice(row, 1).to_pylist()[0])
        except NO_VALUE as error:
            yield _unread(error)


def _scalar(value: Any) -> Any:
    try:
        return value.as_py()
    except NO_VALUE as error:
        return _unread(error)


def _unread(error: Exception) -> Problem:
    """Of a value that Python does not have."""
    return Problem("not UTF-8 text" if isinstance(error, UnicodeDecodeError) else first_line(error)[:120])


def _datasets(path: Path) -> Any:
    return splits(path)[0]


def _table_rows(dataset: Any, where: str) -> Iterator[tuple[str, float, Any]]:
    """The rows of a `datasets` table, which stays on the disk."""
    if chats := chat_columns(dataset.column_names):
        for row, record in enumerate(dataset.select_columns(chats), 1):
            yield f"{where}:{row}", row / len(dataset), Chat(record)
        return
    name = text_field(dataset.column_names)
    if name is None:
        raise DataError(f"--data {where}: expected a column named {NAMES}")
    table, row = dataset.select_columns([name]), 0
    for batch in table.iter(batch_size=64):
        for value in batch[name]:
            row += 1
            yield f"{where}:{row}", row / len(dataset), value
