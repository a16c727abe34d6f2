"""A reference whose logits exist already: the rows of a teacher that ran before, read slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ShapeError

RowSource = Callable[[Tensor, slice], Tensor]  # (tokens (n,), entries) -> (n, entries), their logits or log-probs


@dataclass(frozen=True, eq=False)
class RowsOfReference:
    """Logits or log-probs of a reference, (N, V), in memory or mapped into it, or what reads some of them."""

    source: Tensor | RowSource

    def read(self, tokens: slice | Tensor, entries: slice) -> Tensor:  # (n, entries)
        """Some tokens' logits of some entries, wherever they lie and of whichever dtype. Raises ShapeError."""
        if isinstance(self.source, Tensor):
            part = self.source[:, entries]
            return part[tokens if isinstance(tokens, slice) else tokens.to(part.device)]
        if isinstance(tokens, slice):
            tokens = torch.arange(tokens.start, tokens.stop, device="cpu")
        part = self.source(tokens, entries)
        expected = tokens.shape[0], entries.stop - entries.start
        if not isinstance(part, Tensor) or tuple(part.shape) != expected:
            got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ShapeError(f"reference: expected a tensor (tokens, entries) = {expected} of its rows, got {got}")
        return part.detach()
