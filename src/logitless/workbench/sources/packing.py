"""Documents packed into full sequences: no padding, positions restart, nothing crosses a document's end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...errors import DataError, LabelError
from ...units import plural

HELD_OUT_EVERY = 20  # one document in twenty
IGNORED = -100
Collate = Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Stream:
    """Documents end to end: ids (tokens,) uint32 and where each document starts, starts (documents,) int64.

    said: which tokens the loss is of, (tokens,) bool; None: all of them. rows: where in a teacher's record each token
    lies, (tokens,) int64.
    """

    ids: np.ndarray
    starts: np.ndarray
    said: np.ndarray | None = None
    rows: np.ndarray | None = None

    @classmethod
    def of(cls, documents: Iterable[np.ndarray], said: Iterable[np.ndarray] | None = None) -> Stream:
        kept = [ids for ids in documents if len(ids)]
        lengths = np.array([len(ids) for ids in kept], dtype=np.int64)
        ids = np.concatenate(kept) if kept else np.empty(0, dtype=np.uint32)
        masks = None if said is None else np.concatenate([np.empty(0, bool), *said])
        return cls(ids, np.cumsum(lengths) - lengths, masks)

    def cut(self, begin: int, end: int) -> Stream:
        """The tokens begin..end; a document that spans `begin` starts anew there."""
        inside = slice(*np.searchsorted(self.starts, (begin + 1, end)))
        starts = np.concatenate([[begin], self.starts[inside]]).astype(np.int64) - begin
        said, rows = (None if x is None else x[begin:end] for x in (self.said, self.rows))
        return Stream(self.ids[begin:end], starts, said, rows)


class PackedRows(Dataset):
    """Rows of exactly `length` tokens; a shorter rest is left out. Each row: input_ids, position_ids, labels (length,).

    A document that does not fit into one row goes on in the next as a document of its own. Position ids restart at
    each document, which is what tells transformers' attention not to look across; the label of a first token is
    -100, since no token before it belongs to its document, and so is that of a token that is not said.
    labels[i] = input_ids[i]: models shift by themselves.
    """

    def __init__(self, stream: Stream, length: int, most: int | None = None) -> None:
        self.stream, self.length = stream, length
        self.rows = len(stream.ids) // length
        if most is not None:
            self.rows = min(self.rows, most)

    def whole_steps(self, rows: int) -> PackedRows:
        """These rows without the last ones that would fill a step of `rows` only in part; all, where they fill none."""
        return PackedRows(self.stream, self.length, len(self) // rows * rows or len(self))

    def filled(self, rows: int) -> PackedRows:
        """These rows and as many without a label as make their number a multiple of `rows`.

        Ranks that must have as many of them as each other would be given some twice.
        """
        own, more = len(self) * self.length, -len(self) % rows * self.length
        if not more:
            return self
        stream = self.stream.cut(0, own)
        said = np.ones(own, bool) if stream.said is None else stream.said
        places = None if stream.rows is None else np.pad(stream.rows, (0, more))
        starts = np.append(stream.starts, np.arange(own, own + more, self.length))
        return PackedRows(Stream(np.pad(stream.ids, (0, more)), starts, np.pad(said, (0, more)), places), self.length)

    def targets(self) -> int:
        """How many tokens of all rows the loss is of."""
        count, said = self.rows * self.length, self.stream.said
        counted = np.ones(count, bool) if said is None else said[:count].copy()
        counted[:: self.length] = False
        counted[self.stream.starts[self.stream.starts < count]] = False
        return int(counted.sum())

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        begin, end = row * self.length, (row + 1) * self.length
        if not 0 <= row < len(self):
            raise IndexError(row)
        part = self.stream.cut(begin, end)
        ids = torch.from_numpy(part.ids.astype(np.int64))
        index = np.arange(self.length)
        first = np.zeros(self.length, dtype=np.int64)
        first[part.starts] = part.starts
        position = torch.from_numpy(index - np.maximum.accumulate(first))
        labels = ids.masked_fill(position == 0, IGNORED)
        if part.said is not None:
            labels = labels.masked_fill(~torch.from_numpy(part.said), IGNORED)
        return {"input_ids": ids, "position_ids": position, "labels": labels}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of rows, (batch, length) each. No attention mask: an all-ones mask would switch the packed one off."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def one_in(every: int, items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """(the others, one of each `every` items): as documents, conversations and prompts are held out."""
    held = range(every // 2, len(items), every)
    return [item for i, item in enumerate(items) if i not in held], [items[i] for i in held]


def hold_out(documents: list[np.ndarray], length: int) -> tuple[Stream, Stream]:
    """(train, held out): every twentieth document is held out, or the last tokens of a corpus of few documents."""
    kept, held = (Stream.of(some) for some in one_in(HELD_OUT_EVERY, documents))
    if len(held.ids) >= length and len(kept.ids) >= length:
        return kept, held
    whole = Stream.of(documents)
    tail = max(length, len(whole.ids) // HELD_OUT_EVERY)
    if len(whole.ids) < 2 * length:
        raise DataError(
            f"the corpus has {plural(len(whole.ids), 'token')}, two sequences (one to train on, one held out) need "
            f"{2 * length:,}: give more text or lower --context-length"
        )
    return whole.cut(0, len(whole.ids) - tail), whole.cut(len(whole.ids) - tail, len(whole.ids))


def check_ids(stream: Stream, vocab_size: int) -> None:
    """LabelError when an id has no row in the model's vocabulary."""
    if len(stream.ids) and int(stream.ids.max()) >= vocab_size:
        raise LabelError(
            f"the tokenizer gives ids up to {int(stream.ids.max()):,}, the model's vocabulary ends at "
            f"{vocab_size - 1:,}: use a model with this tokenizer's vocabulary"
        )
