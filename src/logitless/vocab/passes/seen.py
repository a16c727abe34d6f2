"""What a caller's loss function sees of a chunk: its tokens, or whole sequences of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..call.call import Call, blank_of
from ..sizing import current_sizing


class Seen(ABC):
    """How a chunk's numbers and the caller's inputs are shown, of the valid tokens `rows`, and what has a loss each."""

    unit: str  # what has a loss of its own
    total: int  # how many there are
    counting: Tensor | None = None  # those that count, where some do not
    together: list[slice] | None = None  # the valid tokens that are seen at once, where a chunk is not any of them

    def __init__(self, call: Call) -> None:
        self.call = call

    @abstractmethod
    def which(self, rows: slice) -> slice:
        """Which of those that count they are."""

    @abstractmethod
    def numbers(self, name: str, x: Tensor, rows: slice) -> Tensor:
        """A statistic of theirs, (n, ...), as the loss function sees it."""

    @property
    def every(self) -> slice:
        """All valid tokens."""
        return slice(0, self.call.n_tokens)

    def losses(self, rows: slice) -> int:
        """How many losses they have."""
        which = self.which(rows)
        return which.stop - which.start

    def units(self, rows: slice) -> slice | Tensor:
        """Which rows of the caller's inputs are theirs."""
        which = self.which(rows)
        return which if self.counting is None else self.counting[which]

    def spread(self, loss: Tensor) -> Tensor:
        """The losses of all that count in the places of all, 0 where none counts."""
        if self.counting is None:
            return loss
        return loss.new_zeros(self.total).index_put((self.counting,), loss)


def seen_of(call: Call, sequences: tuple[int, ...] | None) -> Seen:
    """Tokens, or sequences: (B, ...), hidden's leading dimensions, B sequences and a sequence's tokens."""
    return Tokens(call) if sequences is None else Sequences(call, sequences)


class Tokens(Seen):
    """Each token has a loss of its own."""

    unit = "token"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.total, self.counting = call.inputs.hidden.shape[0], call.index

    def which(self, rows: slice) -> slice:
        return rows

    def numbers(self, name: str, x: Tensor, rows: slice) -> Tensor:
        return x


class Sequences(Seen):
    """A sequence has one loss, of all its tokens, where one of these counts; ignored ones have what statistics give."""

    unit = "sequence"

    def __init__(self, call: Call, lead: tuple[int, ...]) -> None:
        super().__init__(call)
        self.total, self.shape = lead[0], lead[1:]
        self.tokens = math.prod(self.shape)  # of a sequence, the ignored ones too
        counts = self._counts()
        self.starts = [0, *accumulate(n for n in counts if n)]
        self.together = [slice(a, b) for a, b in pairwise(self.starts)]
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

    def which(self, rows: slice) -> slice:
        return slice(bisect_left(self.starts, rows.start), bisect_left(self.starts, rows.stop))

    def numbers(self, name: str, x: Tensor, rows: slice) -> Tensor:
        there, n = self.call.tokens(rows), self.losses(rows)
        if isinstance(there, Tensor):
            sequence, place = there // self.tokens, there % self.tokens
            if self.counting is not None:
                sequence = torch.searchsorted(self.counting, sequence)
            at = (sequence - self.which(rows).start) * self.tokens + place
            blank = x.new_full((n * self.tokens, *x.shape[1:]), blank_of(name))
            x = blank.index_put((at,), x)
        return x.reshape(n, *self.shape, *x.shape[1:])
