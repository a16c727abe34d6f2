"""The tokens of a run: read, tokenised, split and kept beside the run, so that a resumed run sees the same rows."""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ...errors import DataError
from ..runs.corpus import documents
from ..runs.files import damaged, write_whole
from ..runs.packing import PackedRows, Stream, check_ids, hold_out
from ..runs.tokenizer import TextTokenizer
from .config import TrainConfig

HELD_OUT_TOKENS = 8192  # looked at before and after training; more would only cost time


def prepare(config: TrainConfig, tokenizer: TextTokenizer, vocab_size: int, path: Path) -> None:
    """Tokenises `--data` into the file `path`, once. Raises DataError and LabelError."""
    texts, held_texts = documents(config.data)
    train = list(tokenizer.documents(texts))
    if not train:
        raise DataError(f"--data {config.data or 'stdlib'}: no text in it")
    if held_texts is None:
        kept, held = hold_out(train, config.context_length)
    else:
        kept, held = Stream.of(train), Stream.of(tokenizer.documents(held_texts))
        _require_row(kept, config.context_length, "training")
        _require_row(held, config.context_length, "held-out")
    for stream in (kept, held):
        check_ids(stream, vocab_size)
    write_whole(path, lambda temporary: _save(temporary, kept, held))


def load(path: Path, length: int) -> tuple[PackedRows, PackedRows]:
    """(training rows, held-out rows) from a file that `prepare` wrote; nothing in it is unpickled. Raises DataError."""
    if not path.exists():
        raise DataError(f"{path} is not on this machine: all ranks need an --output-dir that all of them see")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            kept, held = (Stream(arrays[f"{name}_ids"], arrays[f"{name}_starts"]) for name in ("train", "held"))
    except (BadZipFile, EOFError, KeyError, ValueError):
        raise DataError(damaged(path)) from None
    return PackedRows(kept, length), PackedRows(held, length, max(1, HELD_OUT_TOKENS // length))


def _save(path: Path, kept: Stream, held: Stream) -> None:
    with path.open("wb") as file:
        np.savez(file, train_ids=kept.ids, train_starts=kept.starts, held_ids=held.ids, held_starts=held.starts)


def _require_row(stream: Stream, length: int, what: str) -> None:
    if len(stream.ids) < length:
        raise DataError(
            f"the {what} documents have {len(stream.ids):,} tokens, one sequence needs {length:,}: "
            "give more text or lower --context-length"
        )
