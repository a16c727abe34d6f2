"""A head on some tokens as plain differentiable torch: whole slices of logits, or logits at a few ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..vocab.head import LMHead
from ..vocab.lowrank import up_of, with_low_rank
from ..vocab.problem import Inputs, compute_dtype
from .rows import rows_dot


@dataclass(frozen=True)
class Terms:
    """z = softcap(scale·(Σ xᵢ·tableᵢᵀ + bias)): hidden with the weight, then low with up where there are adapters.

    low is formed before, by autograd, which so owns the gradients of the adapters' a and the dropout masks.
    """

    tensors: tuple[Tensor, ...]  # n of (N, Hᵢ) fp32 or fp64, n of (V, Hᵢ), and (V,) where there is a bias
    n: int
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, hidden: Tensor, head: LMHead) -> Terms:
        """The head on hidden (N, H)."""
        low, up = with_low_rank(Inputs(hidden, head.weight), head, None).low, up_of(head)
        bias = [] if head.bias is None else [head.bias]
        x = hidden.to(compute_dtype(hidden))
        if low is None or up is None:
            return cls((x, head.weight, *bias), 1, head.scale, head.softcap)
        return cls((x, low, head.weight, up, *bias), 2, head.scale, head.softcap)

    def holding(self, tensors: Sequence[Tensor]) -> Terms:
        """The same head with other tensors."""
        return replace(self, tensors=tuple(tensors))

    @property
    def xs(self) -> tuple[Tensor, ...]:
        return self.tensors[: self.n]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self.tensors[self.n : 2 * self.n]

    @property
    def bias(self) -> Tensor | None:
        return self.tensors[-1] if len(self.tensors) > 2 * self.n else None

    def at(self, ids: Tensor) -> Tensor:
        """z at ids (N, k): a gather of k rows, 2·N·k·H flop."""
        z = rows_dot(self.xs[0], self.tables[0], ids)
        for x, table in zip(self.xs[1:], self.tables[1:], strict=True):
            z = z + rows_dot(x, table, ids)
        return self._finish(z, None if self.bias is None else self.bias[ids])

    def logits(self) -> Tensor:
        """z at all rows of the tables, (N, V), of tensors of one dtype."""
        z = self.xs[0] @ self.tables[0].T
        for x, table in zip(self.xs[1:], self.tables[1:], strict=True):
            z = z + x @ table.T
        return self._finish(z, self.bias)

    def _finish(self, z: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            z = z + bias
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap

    def leaves(self, rows: slice, v: slice, needed: Sequence[bool]) -> list[Tensor]:
        """The tensors of some tokens and entries, as leaves in the tokens' dtype."""
        parts = [x[rows if i < self.n else v] for i, x in enumerate(self.tensors)]
        return [x.detach().to(self.xs[0].dtype).requires_grad_(need) for x, need in zip(parts, needed, strict=True)]
