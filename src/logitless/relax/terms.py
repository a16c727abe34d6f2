"""A head on some tokens as plain differentiable torch: whole slices of logits, or logits at a few ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from ..algebra.costs import DEFAULT_BUDGET, DEQUANTISED, Slices, slices_of
from ..errors import ConfigError
from ..vocab.face import (
    Call,
    LMHead,
    Noise,
    QuantisedWeight,
    VocabShard,
    agreed,
    compute_dtype,
    first_on_all,
    lora_b_of,
    lora_hidden_of,
    place,
    spread,
    summed,
)
from .rows import rows_dot

TILES = 24  # (tokens, width) buffers that live at once: 72 bytes per entry of noise, logits with their graph, weights


def agree(call: Call, alike: str, noise: Noise, drawn: bool) -> None:
    """Makes sure that the ranks which share a head, if it is split, make the same call. Raises RankError on all.

    alike: its options; drawn: the noise is each rank's own as yet, and the first rank's becomes that of all.
    """
    if call.shard is None:
        return
    agreed(replace(call, alike=f"{alike} noise={not drawn}"), *(() if drawn else noise))
    if drawn:
        first_on_all(noise.seeds, call.shard)


@dataclass(frozen=True)
class Terms:
    """z = softcap(scale·(Σ xᵢ·tableᵢᵀ + bias)): hidden with the weight, and lora_hidden with lora_b of adapters.

    lora_hidden is formed before, by autograd, which so owns the gradients of the adapters' a and the dropout masks.
    """

    tensors: tuple[Tensor, ...]  # n of (N, Hᵢ) fp32 or fp64, n of (V, Hᵢ), and (V,) where there is a bias
    n: int
    scale: float
    softcap: float | None
    shard: VocabShard | None = None  # whose rows the tables are
    local_rows: int = 0  # how many of these exist
    packed: QuantisedWeight | None = None  # the weight where it is stored in few bits; its table then has no row

    @classmethod
    def of(cls, hidden: Tensor, head: LMHead, packed: bool = False) -> Terms:
        """The head on hidden (N, H); packed: of a quantised one too, of which `leaves` alone sees rows."""
        weight, quantised = head.weight_tensor, None
        if packed and isinstance(head.weight, QuantisedWeight):
            weight, quantised = hidden.new_empty(0, head.hidden_size), head.weight
        if weight is None:
            raise ConfigError(
                "relax: expected a head of plain numbers, got a quantised one; dequantise its weight first"
            )
        lora_hidden, lora_b = lora_hidden_of(hidden, head), lora_b_of(head)
        bias = [] if head.bias is None else [head.bias]
        x = hidden.to(compute_dtype(hidden))
        rest = head.scale, head.softcap, head.shard, head.local_rows, quantised
        if lora_hidden is None or lora_b is None:
            return cls((x, weight, *bias), 1, *rest)
        return cls((x, lora_hidden, weight, lora_b, *bias), 2, *rest)

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
        """z at ids (N, k): a gather of k rows, 2·N·k·H flop. Of a sharded head (N, k) numbers from every rank."""
        if self.shard is None:
            return self._finish(self._at_rows(self.xs, ids), None)
        rows, mine = place(ids, self.shard.offset, self.local_rows)
        xs = [spread(x, self.shard) for x in self.xs]
        if self.local_rows == 0:  # no product here, but a graph: in backward the others wait for this rank
            nothing = reduce(torch.add, (x[:0].sum() for x in (*xs, *self.tensors[self.n :])))
            return self._finish(summed(nothing.expand(ids.shape), self.shard), None)
        return self._finish(summed(torch.where(mine, self._at_rows(xs, rows), 0.0), self.shard), None)

    def _at_rows(self, xs: Sequence[Tensor], rows: Tensor) -> Tensor:
        """The products and the bias at rows (N, k) of the tables."""
        pairs = zip(xs, self.tables, strict=True)
        z = reduce(torch.add, (rows_dot(x, table, rows) for x, table in pairs))
        return z if self.bias is None else z + self.bias[rows]

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

    def add_gradients(
        self, z: Tensor, dz: Tensor, leaves: Sequence[Tensor], into: Sequence[Tensor | None], rows: slice, v: slice
    ) -> None:
        """Adds to the tensors' gradients what dL/dz gives, z being the logits of `leaves(rows, v, ...)`."""
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        for i, g in zip(wanted, torch.autograd.grad(z, [leaves[i] for i in wanted], dz), strict=True):
            whole = into[i]
            assert whole is not None
            whole[rows if i < self.n else v] += g

    def leaves(self, rows: slice, v: slice, needed: Sequence[bool]) -> list[Tensor]:
        """The tensors of some tokens and entries, as leaves in the tokens' dtype."""
        parts = [x[rows if i < self.n else v] for i, x in enumerate(self.tensors)]
        if self.packed is not None:
            parts[self.n] = self.packed[v].dequantised()
        return [x.detach().to(self.xs[0].dtype).requires_grad_(need) for x, need in zip(parts, needed, strict=True)]


@dataclass(frozen=True)
class Sliced:
    """A head without its tensors, which autograd saves, and the slices in which a pass takes tokens and vocabulary."""

    form: Terms
    slices: Slices

    def chunks(self, n_tokens: int) -> Iterator[slice]:
        step = self.slices.tokens
        return (slice(n, min(n + step, n_tokens)) for n in range(0, n_tokens, step))

    def vocabulary(self) -> Iterator[slice]:
        size, width = self.form.local_rows, self.slices.width
        return (slice(v, min(v + width, size)) for v in range(0, size, width))


def slices_for(terms: Terms, embeddings: Sequence[Tensor], memory_budget: int | None) -> Slices:
    """The slices of a pass over a head on its tokens, and over the rows that are mixed."""
    x = terms.xs[0]
    converted = sum(t.shape[1] for t in (*terms.tables, *embeddings) if t.dtype != x.dtype)
    return slices_of(
        x.shape[0],
        max(1, terms.local_rows),
        budget=memory_budget or DEFAULT_BUDGET,
        device=x.device.type,
        itemsize=x.dtype.itemsize,
        tiles=TILES,
        converted=converted + (0 if terms.packed is None else DEQUANTISED * terms.packed.shape[1]),
    )
