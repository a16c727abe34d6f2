"""The entries that tokens have each of their own, ragged: what a backend sees of a sampling mask.

A chunk's entries stand end to end, (M,), with the place of each token's first in `offsets`. Sums over a token's entries
are sums over its segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...algebra.online_softmax import MASK

Logits = tuple[Tensor, Tensor | None]  # the entries', (M,), and the reference's


@dataclass
class Entries:
    """The entries of a chunk's tokens: ids and each one's token, (M,); where segments begin and end, (C + 1,).

    start: the first entry's place among the call's; labels_at: (C,), where each token's label stands here.
    """

    ids: Tensor
    tokens: Tensor
    offsets: Tensor
    start: int
    labels_at: Tensor | None

    @property
    def counts(self) -> Tensor:
        return self.offsets.diff()

    def sum(self, x: Tensor) -> Tensor:  # (M,) -> (C,)
        return torch.segment_reduce(x, "sum", offsets=self.offsets, initial=0)

    def max(self, x: Tensor, initial: float) -> Tensor:  # (M,) -> (C,)
        return torch.segment_reduce(x, "max", offsets=self.offsets, initial=initial)

    def without_labels(self, x: Tensor) -> Tensor:
        """x as logits, MASK where they are -inf or the label's own."""
        x = x.clamp(min=MASK)
        return x if self.labels_at is None else x.index_fill(0, self.labels_at, MASK)
