"""Windows of a document's tokens: each token is scored once, in a window that gives it context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """A piece's tokens behind what comes before them, which is context and no row: `before` entries of `ids`.

    said: of a conversation which tokens are the assistant's; the others are context with rows, and no score.
    """

    ids: np.ndarray  # (before + n,) int64
    before: int
    said: np.ndarray | None = None  # (before + n,) bool
    problem: str = ""

    @property
    def rows(self) -> int:
        return len(self.ids) - self.before

    def scored(self, window: Window) -> np.ndarray:
        """Places of the tokens that a window scores."""
        places = np.arange(window.new, window.end)
        return places if self.said is None else places[self.said[places]]


@dataclass(frozen=True)
class Window:
    """ids[start:end] of a piece: all but the last are fed, those from `new` on are scored."""

    piece: int
    start: int
    new: int
    end: int

    @property
    def fed(self) -> int:
        return self.end - 1 - self.start


def windows(tokens: Tokens, piece: int, context: int, stride: int) -> Iterator[Window]:
    """The windows of a piece: `context` tokens are fed at most, and each window but the first scores `stride`."""
    n = len(tokens.ids)
    end = min(n, max(context, tokens.before) + 1)  # an opening may be longer
    new = max(1, tokens.before)
    while new < n:
        window = Window(piece, max(0, end - context - 1), new, end)
        if len(tokens.scored(window)):
            yield window
        new, end = end, min(n, end + stride)


def batches(found: Sequence[Window], most: int) -> Iterator[list[Window]]:
    """Windows of about one length together, longest first, at most `most` tokens with their padding; or one window."""
    batch: list[Window] = []
    for window in sorted(found, key=lambda w: (-w.fed, w.piece, w.start)):
        if batch and (len(batch) + 1) * batch[0].fed > most:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


@dataclass(frozen=True)
class Batch:
    """A batch as a model takes it, padded on the right, and where its scores go."""

    inputs: dict[str, Tensor]  # input_ids, attention_mask (B, T)
    at: tuple[Tensor, Tensor]  # (n,) rows and positions that are scored
    labels: Tensor  # (n,)
    rows: np.ndarray  # (n,) of the block
    context: np.ndarray  # (n,) tokens that came before

    @classmethod
    def of(cls, found: list[Window], pieces: list[Tokens], first_rows: Sequence[int], device: torch.device) -> Batch:
        ids = np.zeros((len(found), max(w.fed for w in found)), dtype=np.int64)
        mask = np.zeros_like(ids)
        at: list[np.ndarray] = []
        for b, w in enumerate(found):
            tokens = pieces[w.piece]
            ids[b, : w.fed], mask[b, : w.fed] = tokens.ids[w.start : w.end - 1], 1
            scored = tokens.scored(w)
            row = first_rows[w.piece] + scored - tokens.before
            at.append(np.stack([np.full_like(scored, b), scored - 1 - w.start, tokens.ids[scored], row]))
        b, before, labels, rows = np.concatenate(at, 1)
        inputs = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        places = torch.from_numpy(b).to(device), torch.from_numpy(before).to(device)
        return cls(inputs, places, torch.from_numpy(labels).to(device), rows, before + 1)
