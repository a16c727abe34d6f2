"""A reference whose logits exist already: the rows of a teacher that ran before, read slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...errors import ShapeError

RowSource = Callable[[Tensor, slice], Tensor]  # (tokens (n,), entries) -> (n, entries), their logits or log-probs


@dataclass(frozen=True, eq=False)
class RowsOfReference:
    """Logits or log-probs of a reference, (..., V), in memory or mapped into it, or what reads some of them.

    The leading dimensions are flat but where that would copy all rows, such as of `logits[:, :-1]`.
    """

    source: Tensor | RowSource

    @classmethod
    def of(cls, rows: Tensor) -> RowsOfReference:
        """Rows of logits, (..., V), as a constant."""
        sizes = [(size, step) for size, step in zip(rows.shape[:-1], rows.stride(), strict=False) if size != 1]
        is_view = rows.numel() == 0 or all(step == size * inner for (_, step), (size, inner) in pairwise(sizes))
        return cls(rows.detach().reshape(-1, rows.shape[-1]) if is_view else rows.detach())

    def read(self, tokens: slice | Tensor, entries: slice) -> Tensor:  # (n, entries)
        """Some tokens' logits of some entries, wherever they lie and of whichever dtype. Raises ShapeError."""
        if isinstance(self.source, Tensor):
            return _some(self.source[..., entries], tokens)
        if isinstance(tokens, slice):
            tokens = torch.arange(tokens.start, tokens.stop, device="cpu")
        part = self.source(tokens, entries)
        expected = tokens.shape[0], entries.stop - entries.start
        if not isinstance(part, Tensor) or tuple(part.shape) != expected:
            got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ShapeError(f"reference: expected a tensor (tokens, entries) = {expected} of its rows, got {got}")
        return part.detach()


def _some(rows: Tensor, tokens: slice | Tensor) -> Tensor:
    """Some tokens of (..., S), in the order in which all lie; nothing waits for the device."""
    if rows.dim() == 2 and isinstance(tokens, slice):
        return rows[tokens]
    if isinstance(tokens, slice):
        tokens = torch.arange(tokens.start, tokens.stop, device=rows.device)
    tokens, places = tokens.to(rows.device), []
    for size in reversed(rows.shape[1:-1]):
        places.append(tokens % size)
        tokens = tokens // size
    return rows[(tokens, *reversed(places))]
