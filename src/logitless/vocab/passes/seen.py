"""What a caller's loss function sees of a chunk: its tokens, or whole sequences of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from itertools import accumulate

import torch
from torch import Tensor

from ..call.call import Call, blank_of
from ..sizing import current_sizing


class Seen(ABC):
    """How a chunk's numbers and the caller's inputs are shown, of the valid tokens `rows`."""

    unit: str  # what has a loss of its own
    together: list[slice] | None = None  # the valid tokens that are seen at once, where a chunk is not any of them

    @abstractmethod
    def numbers(self, name: str, x: Tensor, rows: slice) -> Tensor:
        """A statistic of theirs, (n, ...), as the loss function sees it."""

    @abstractmethod
    def losses(self, rows: slice) -> int:
        """How many losses they have."""

    @abstractmethod
    def units(self, rows: slice) -> slice | Tensor:
        """Which rows of the caller's inputs are theirs."""

    @abstractmethod
    def spread(self, loss: Tensor) -> Tensor:
        """The losses of all that count in the places of all, 0 where none counts."""


class Tokens(Seen):
    """Each token has a loss of its own."""

    unit = "token"

    def __init__(self, call: Call) -> None:
        self.call = call

    def numbers(self, name: str, x: Tensor, rows: slice) -> Tensor:
        return x

    def losses(self, rows: slice) -> int:
        return rows.stop - rows.start

    def units(self, rows: slice) -> slice | Tensor:
        return self.call.tokens(rows)

    def spread(self, loss: Tensor) -> Tensor:
        if self.call.index is None:
            return loss
        return loss.new_zeros(self.call.inputs.hidden.shape[0]).index_put((self.call.index,), loss)


class Sequences(Seen):
    """A sequence has one loss, of all its tokens, where one of these counts; ignored ones have what statistics give."""

    unit = "sequence"

    def __init__(self, call: Call, lead: tuple[int, ...]) -> None:
        """lead: (B, ...), the leading dimensions of hidden states: sequences, and a sequence's tokens."""
        self.call, self.total, self.shape = call, lead[0], lead[1:]
        self.tokens = math.prod(self.shape)  # of a sequence, the ignored ones too
        counts = self._counts()
        self.starts = [0, *accumulate(n for n in counts if n)]
        self.together = [slice(a, b) for a, b in zip(self.starts, self.starts[1:], strict=False)]
        self.counting: Tensor | None = None  # the sequences that count, where some do not
        if not all(counts):
            ids = [i for i, n in enumerate(counts) if n]
            self.counting = torch.tensor(ids, dtype=torch.int64, device=call.inputs.hidden.device)

    def _counts(self) -> list[int]:
        """The valid tokens of each sequence; the host waits for the device where some are ignored."""
        index = self.call.index
        if index is None:
            return [self.tokens] * self.total
        if current_sizing() is not None:  # which they are, nobody knows
            each, more = divmod(index.shape[0], self.total)
            return [each + (i < more) for i in range(self.total)]
        return torch.bincount(index // self.tokens, minlength=self.total).tolist()

    def _which(self, rows: slice) -> slice:
        """The sequences, of those that count, of valid tokens from one's first to another's last."""
        return slice(bisect_left(self.starts, rows.start), bisect_left(self.starts, rows.stop))

    def numbers(self, name: str, x: Tensor, rows: slice) -> Tensor:
        there, n = self.call.tokens(rows), self.losses(rows)
        if isinstance(there, Tensor):
            sequence, place = there // self.tokens, there % self.tokens
            if self.counting is not None:
                sequence = torch.searchsorted(self.counting, sequence)
            at = (sequence - self._which(rows).start) * self.tokens + place
            blank = x.new_full((n * self.tokens, *x.shape[1:]), blank_of(name))
            x = blank.index_put((at,), x)
        return x.reshape(n, *self.shape, *x.shape[1:])

    def losses(self, rows: slice) -> int:
        which = self._which(rows)
        return which.stop - which.start

    def units(self, rows: slice) -> slice | Tensor:
        which = self._which(rows)
        return which if self.counting is None else self.counting[which]

    def spread(self, loss: Tensor) -> Tensor:
        if self.counting is None:
            return loss
        return loss.new_zeros(self.total).index_put((self.counting,), loss)
