"""`SparseRows`: documents as their few entries of a vocabulary, and the scores of documents and queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ShapeError


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows of a (B, size) matrix as the entries that were kept, end to end (CSR).

    offsets: (B + 1,), where each row's entries begin and the last one's end; ids: (M,), ascending in a row; values:
    (M,), differentiable; tokens: (M,) int32, the place in its document of the token that an entry is from.
    """

    offsets: Tensor
    ids: Tensor
    values: Tensor
    size: int
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def rows(self) -> Tensor:
        """The row of each entry, (M,)."""
        return torch.arange(len(self), device=self.ids.device).repeat_interleave(self.offsets.diff())

    def map(self, change: Callable[[Tensor], Tensor]) -> SparseRows:
        """The same entries with `change(values)`, such as `splade_activation`."""
        return replace(self, values=change(self.values))

    def dense(self, fill: float = 0.0) -> Tensor:
        """(B, size), differentiable; `fill` where nothing was kept."""
        out = self.values.new_full((len(self), self.size), fill)
        return out.index_put((self.rows, self.ids), self.values)


def scores(queries: Tensor | SparseRows, documents: Tensor | SparseRows) -> Tensor:
    """The dot product of every query with every document, (Q, B).

    Dense equivalent:

        queries @ documents.T

    queries: (Q, V), documents: (B, V), each dense or `SparseRows`; differentiable in both. Sparse documents cost their
    entries times Q, and never are (B, V). Raises ShapeError.
    """
    check_rows("queries", queries)
    check_rows("documents", documents)
    size = documents.size if isinstance(documents, SparseRows) else documents.shape[-1]
    dense = queries.dense() if isinstance(queries, SparseRows) else queries
    if dense.shape[-1] != size:
        raise ShapeError(f"scores: expected queries and documents of one vocabulary, got {dense.shape[-1]} and {size}")
    if isinstance(documents, Tensor):
        return dense @ documents.T
    table, starts = dense.T.contiguous(), documents.offsets[:-1]
    weights = documents.values.to(table.dtype)
    return F.embedding_bag(documents.ids, table, starts, per_sample_weights=weights, mode="sum").T


def check_rows(name: str, x: object) -> None:
    """ShapeError for what is no matrix of weights, such as one document's own (V,)."""
    if isinstance(x, SparseRows) or (isinstance(x, Tensor) and x.dim() == 2):
        return
    got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    raise ShapeError(f"{name}: expected (rows, vocabulary), a tensor or SparseRows, got {got}")
