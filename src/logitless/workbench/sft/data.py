"""The tokens of a run: read, tokenised, split and kept beside the run, so that a resumed run sees the same rows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from ...units import plural
from ..common.files import readable, write_whole
from ..sources import chat
from ..sources.chat import Example, NotToldApart, example
from ..sources.corpus import Row, chat_columns, documents, is_chat, table
from ..sources.packing import PackedRows, Stream, check_ids, hold_out
from ..sources.tokenizer import TextTokenizer
from .config import TrainConfig

if TYPE_CHECKING:
    from .teacher import Teacher

TEACHER = "teacher"  # in the file: which record the rows are of
OPTIONAL = ("said", "rows")  # of a stream
HELD_OUT_TOKENS = 8192  # looked at before and after training; more would only cost time


def prepare(
    config: TrainConfig, tokenizer: TextTokenizer, vocab_size: int, path: Path, teacher: Teacher | None = None
) -> list[str]:
    """Tokenises `--data`, or takes a teacher's tokens, into the file `path`, once; returns what is to be said about it.

    Raises DataError, LabelError, and ConfigError for conversations without a chat template.
    """
    chats = None if teacher else _chats(config.data)
    if teacher is not None:
        kept, held, remarks = teacher.streams(config.context_length)
    elif chats is None:
        kept, held, remarks = _of_text(config, tokenizer)
    else:
        kept, held, remarks = _of_chats(config, tokenizer, *chats)
    for stream in (kept, held):
        check_ids(stream, vocab_size)
    if not PackedRows(kept, config.context_length).targets():
        source = config.data_said if teacher is None else f"--teacher {config.teacher}"
        raise DataError(
            f"{source}: no token follows another in a training document: expected some of two tokens or more: give "
            "longer ones"
        )
    known = {} if teacher is None else {TEACHER: np.array(teacher.record.identity)}
    write_whole(path, lambda temporary: _save(temporary, kept, held, known))
    return remarks


def check_teacher(path: Path, teacher: Teacher | None) -> None:
    """DataError where the rows in a file that `prepare` wrote are of another record than the teacher's."""
    if teacher is None:
        return
    with readable(path), np.load(path, allow_pickle=False) as arrays:
        before = str(arrays[TEACHER]) if TEACHER in arrays else "none"
    if before != teacher.record.identity:
        raise DataError(
            f"--teacher {teacher.record.path} has changed since the run began (identity {before}, now "
            f"{teacher.record.identity}): put the record back, or begin another run"
        )


def _of_text(config: TrainConfig, tokenizer: TextTokenizer) -> tuple[Stream, Stream, list[str]]:
    remarks: list[str] = []
    texts, held_texts = documents(config.data, remarks.append)
    train = list(tokenizer.documents(texts))
    if not train:
        raise DataError("; ".join([f"{config.data_said}: no text in it", *remarks]))
    if held_texts is None:
        return *hold_out(train, config.context_length), remarks
    kept, held = Stream.of(train), Stream.of(tokenizer.documents(held_texts))
    _require_row(kept, config.context_length, "training")
    _require_row(held, config.context_length, "held-out")
    return kept, held, remarks


def _chats(data: str | None) -> tuple[Iterable[Row], Iterable[Row] | None] | None:
    """(conversations, those held out or None) where the data is of conversations."""
    found = table(data, chat_columns)
    if found is None:
        return None
    rows = iter(found[0])
    first = next(rows, {})
    return (chain([first], rows), found[1]) if is_chat(first) else None


def _of_chats(
    config: TrainConfig, tokenizer: TextTokenizer, rows: Iterable[Row], held_rows: Iterable[Row] | None
) -> tuple[Stream, Stream, list[str]]:
    def examples(some: Iterable[Row], what: str) -> list[Example]:
        every = config.loss_on == "all"
        try:
            return [example(row, tokenizer, f"{config.data}: {what} {i}", every) for i, row in enumerate(some)]
        except NotToldApart as error:
            raise DataError(f"{error}, or --loss-on all") from None

    train = examples(rows, "row")
    train, held = chat.hold_out(train) if held_rows is None else (train, examples(held_rows, "held-out row"))
    packed = [chat.packed(some, config.context_length, tokenizer.eos_id) for some in (train, held)]
    for (stream, remarks), what in zip(packed, ("training", "held-out"), strict=True):
        if not len(stream.ids):
            why = "; ".join(remarks) or "there are none"
            raise DataError(f"--data {config.data}: no {what} conversation can be learned from: {why}")
    return packed[0][0], packed[1][0], packed[0][1]


def load(path: Path, length: int) -> tuple[PackedRows, PackedRows]:
    """(training rows, held-out rows) from a file that `prepare` wrote; nothing in it is unpickled. Raises DataError."""
    if not path.exists():
        raise DataError(f"{path} is not on this machine: all ranks need an --output-dir that all of them see")
    with readable(path), path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        kept, held = (
            Stream(
                arrays[f"{name}_ids"],
                arrays[f"{name}_starts"],
                arrays.get(f"{name}_said"),
                arrays.get(f"{name}_rows"),
            )
            for name in ("train", "held")
        )
    return PackedRows(kept, length), PackedRows(held, length, max(1, HELD_OUT_TOKENS // length))


def _save(path: Path, kept: Stream, held: Stream, known: dict[str, Any]) -> None:
    arrays: dict[str, Any] = {
        f"{name}_{part}": array
        for name, stream in (("train", kept), ("held", held))
        for part in ("ids", "starts", *OPTIONAL)
        for array in (getattr(stream, part),)
        if array is not None
    }
    with path.open("wb") as file:
        np.savez(file, **arrays, **known)


def _require_row(stream: Stream, length: int, what: str) -> None:
    if len(stream.ids) < length:
        raise DataError(
            f"the {what} documents have {plural(len(stream.ids), 'token')}, one sequence needs {length:,}: "
            "give more text or lower --context-length"
        )
