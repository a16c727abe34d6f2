"""Slices of logits: one head's product with a block of tokens, written into a reused buffer."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from ...algebra.online_softmax import MASK
from ..call.rows_of_reference import RowsOfReference
from ..devices import bf16_products, exp_is_fast
from ..head.lm_head import LMHead, place
from ..head.quantised import Weight, plain
from .compiled import few
from .conversions import multiplies_tiles, operand_dtype
from .products import add_product, product

LOG2E = math.log2(math.e)
SUMMED = 4096  # rows of a weight that are converted at a time, at most


def exp_(x: Tensor) -> Tensor:
    """e^x in place."""
    return exp_into(x, x)


def exp_into(x: Tensor, out: Tensor | None) -> Tensor:
    """e^x into `out` or a new tensor: where exp is slow, as exp2 of a scaled x, which costs a third of it."""
    return torch.exp(x, out=out) if exp_is_fast(x) else torch.mul(x, LOG2E, out=out).exp2_()


class FewRows(Protocol):
    """Products with a few rows of a table for each token, as every backend has them: see `rows`."""

    def dot(
        self, x: Tensor, table: Weight, ids: Tensor, cast: torch.dtype, dtype: torch.dtype, of: Tensor | None
    ) -> Tensor: ...

    def add_weighted(
        self, into: Tensor, weights: Tensor, table: Weight, ids: Tensor, cast: torch.dtype, of: Tensor | None
    ) -> None: ...

    def scatter(self, weights: Tensor, x: Tensor, ids: Tensor, into: Tensor, of: Tensor | None) -> None: ...


Buffer = Callable[[tuple[int, int]], Tensor]  # room for rows, with anything in it, the same at every call
Once = Callable[[torch.dtype, Callable[[], Tensor]], Tensor]  # a copy of this dtype, asked for once a call
Operands = tuple[Tensor, ...]  # a slice of each of a head's factors, in the dtypes that they multiply in


class Factor:
    """One product of a head: tokens (C, K) times entries (V, K), as h and W, or an adapter's lora_hidden and lora_b."""

    def __init__(
        self,
        tokens: Tensor,
        entries: Weight,
        inner: float | Tensor,
        compute: torch.dtype,
        cast: torch.dtype,
        few_rows: FewRows,
        buffer: Buffer,
        once: Once | None = None,  # where the entries' copies in other dtypes stay for the whole call
    ) -> None:
        self.entries, self.cast, self.compute, self.few_rows = entries, cast, compute, few_rows
        self.buffer, self.once = buffer, once
        self.dtype = operand_dtype(tokens, cast, compute)
        self.tokens = tokens.detach().to(self.dtype)
        self.is_bf16 = tokens.dtype == cast == torch.bfloat16  # both operands, whose copies may be wider
        self.in_tiles = multiplies_tiles(tokens, cast, compute)
        unit = isinstance(inner, float) and inner == 1.0
        self.scaled = self.dtype == compute and not self.in_tiles and not unit
        self.late = None if self.scaled or unit else inner  # the factor that the product still lacks
        self.rows = self.tokens * inner if self.scaled else self.tokens

    def operand(self, v: slice, passing: bool = False) -> Tensor:
        """A slice of the entries in the operands' dtype; of a quantised head in a buffer, until the next slice.

        passing: whether a converted slice may be in the buffer, too: new memory costs a CPU more time.
        """
        (table, cast), shape = self.table, (v.stop - v.start, self.entries.shape[1])
        if not isinstance(table, Tensor):
            return table.rows(v, self.buffer(shape)).to(cast).to(self.dtype)
        rows = table[v].to(cast)
        in_buffer = passing and rows.dtype != self.dtype
        return self.buffer(shape).copy_(rows) if in_buffer else rows.to(self.dtype)

    @property
    def table(self) -> tuple[Weight, torch.dtype]:
        """The entries, converted where the copy stays, and the dtype that they are rounded to."""
        entries = self.entries
        if self.once is None or not isinstance(entries, Tensor) or entries.dtype == self.dtype:
            return entries, self.cast
        return self.once(self.dtype, lambda: entries.to(self.cast).to(self.dtype)), self.dtype

    def operand_of_gradient(self, v: slice, part: Tensor, dtype: torch.dtype) -> Tensor:
        """`operand`'s slice in the dtype that dL/dz has; of a copy of all entries where such copies stay."""
        table, cast = self.table
        if self.once is None or part.dtype == dtype or not isinstance(table, Tensor):
            return part.to(dtype)
        return self.once(dtype, lambda: table.to(cast).to(self.dtype).to(dtype))[v]

    def at(self, ids: Tensor, of: Tensor | None = None) -> Tensor:
        """The product at given entries: ids (C, k) -> (C, k); a dot product each. of: as `Projection.at`'s."""
        table, cast = self.table
        z = self.few_rows.dot(self.rows, table, ids, cast, self.compute, of)
        return z if self.late is None else z * of_tokens(self.late, of)

    def scatter(
        self, ids: Tensor, c: Tensor, tokens: Tensor | None, entries: Tensor | None, of: Tensor | None = None
    ) -> None:
        """Adds the gradient of Σ c·(tokens·entries at ids), ids and c (C, k), to the two tensors that are there."""
        if tokens is not None:
            table, cast = self.table
            self.few_rows.add_weighted(tokens, c, table, ids, cast, of)
        if entries is not None:
            self.few_rows.scatter(c, self.tokens, ids, entries, of)

    def total(self, entry_sum: Tensor) -> Tensor:
        """The product summed over all entries, (C,), from their sum (K,)."""
        z = torch.mv(self.rows.to(self.compute), entry_sum)
        return z if self.late is None else z * _flat(self.late)


class Projection:
    """One head applied to a block of tokens: z = outer·tanh(inner·(hW + b)) or inner·(hW + b)."""

    def __init__(
        self,
        hidden: Tensor,
        head: LMHead,
        temperature: float | Tensor,
        compute: torch.dtype,
        few_rows: FewRows,
        *,
        autocast: torch.dtype | None = None,
        lora: tuple[Tensor | None, Tensor | None] = (None, None),  # (C, R) of the tokens, (V, R) of the entries
        buffer: Buffer,
        once: Once | None = None,
    ) -> None:
        self.head = head
        self.compute = compute
        self.bias = None if head.bias is None else head.bias.detach()[: head.local_rows].to(compute).contiguous()
        column = temperature.to(compute)[:, None] if isinstance(temperature, Tensor) else temperature
        # factors are numbers, or (C, 1) where the temperature is per token
        self.inner = head.scale / (head.softcap if head.softcap else column)
        self.outer = head.softcap / column if head.softcap else None
        self.row_scale = head.scale / column  # dz/d(hW) where the softcap is flat
        weight, (lora_hidden, lora_b) = head.weight.detach()[: head.local_rows], lora
        self.factors = [Factor(hidden, weight, self.inner, compute, autocast or weight.dtype, few_rows, buffer, once)]
        if lora_hidden is not None and lora_b is not None:  # small: they multiply in the compute dtype
            entries = lora_b.detach()[: head.local_rows]
            self.factors.append(Factor(lora_hidden, entries, self.inner, compute, lora_b.dtype, few_rows, buffer))
        self.widths = [f.entries.shape[1] for f in self.factors]

    @property
    def may_be_infinite(self) -> bool:
        """Whether a logit can be -inf: only a bias can make it so."""
        return self.bias is not None

    def operand(self, v: slice, passing: bool = False) -> Operands:
        """The slice of every factor in its operands' dtype."""
        first, *others = self.factors
        return first.operand(v, passing), *(f.operand(v) for f in others)

    def logits(self, w: Operands, v: slice, out: Tensor) -> Tensor:
        """z of one slice, (C, S), into `out`; -inf stays, see `Chunk.mask`."""
        first = self.factors[0]
        with bf16_products(first.in_tiles):
            product(first.rows, w[0].t(), out)
        return self._finish(w[1:], v, out)

    def logits_of_few(self, v: slice, out: Tensor) -> Tensor:
        """`logits` of a few bf16 tokens, by bf16 entries as they lie: see `compiled.few`."""
        first, *others = self.factors
        few.product_of_few(first.tokens, plain(first.entries)[v], out)
        return self._finish(tuple(f.operand(v) for f in others), v, out)

    def _finish(self, others: Operands, v: slice, out: Tensor) -> Tensor:
        """z of one slice from the first factor's product, in its place."""
        first = self.factors[0]
        if first.late is not None:
            out.mul_(first.late)
        for f, part in zip(self.factors[1:], others, strict=True):
            add_product(f.rows, part.t(), out)
        if self.bias is not None:
            bias = self.bias[v]
            out.addcmul_(bias, self.inner) if isinstance(self.inner, Tensor) else out.add_(bias, alpha=self.inner)
        if self.outer is not None:
            out.tanh_().mul_(self.outer)
        return out

    def place(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """`head.place`, with None where no rank has other rows."""
        return (ids, None) if self.head.shard is None else place(ids, self.head.vocab_start, self.head.local_rows)

    def at(self, ids: Tensor, of: Tensor | None = None) -> Tensor:
        """z at given entries: ids (C,) or (C, K) -> same shape; a dot product per entry. 0 for those of other ranks.

        of: where ids are (M,) or (M, K), the token of each.
        """
        columns, mine = self.place(ids if ids.dim() == 2 else ids[:, None])
        if self.head.local_rows == 0:
            return torch.zeros(ids.shape, dtype=self.compute, device=ids.device)
        z = sum_of(f.at(columns, of) for f in self.factors)
        if self.bias is not None:
            z = z + self.bias[columns] * of_tokens(self.inner, of)
        if self.outer is not None:
            z = torch.tanh(z) * of_tokens(self.outer, of)
        return (z if mine is None else torch.where(mine, z, 0.0)).view(ids.shape)

    def mean(self, sums: list[Tensor], weights: Tensor | None = None) -> Tensor:
        """The mean logit per token from the factors' summed entries; only without a softcap. weights: as the sums'."""
        total = sum_of(f.total(entry_sum) for f, entry_sum in zip(self.factors, sums, strict=True))
        if self.bias is not None:
            bias = self.bias if weights is None else weights * self.bias
            total = total + bias.sum() * _flat(self.inner)
        return total / self.head.rows

    def chain(self, dz: Tensor, z: Tensor | None = None) -> Tensor:
        """dL/d(hW), (C,) or (C, k), from dL/dz: the row's scale, and the softcap's derivative where `z` is given."""
        wide = dz.dim() == 2
        dz = dz * (self.row_scale if wide else _flat(self.row_scale))
        if z is None or self.outer is None:
            return dz
        return dz * flatness(z, self.outer if wide else _flat(self.outer))

    def flatness(self, z: Tensor) -> Tensor | None:
        """The softcap's derivative 1 - tanh² from z, 0 at masked entries; None without a softcap."""
        return None if self.outer is None else flatness(z, self.outer)


class GivenLogits(Projection):
    """A block of tokens' logits that exist already, in the place of a head's products; divided by a temperature."""

    def __init__(
        self,
        rows: RowsOfReference,
        tokens: slice | Tensor,
        head: LMHead,
        temperature: float | Tensor,
        compute: torch.dtype,
    ) -> None:
        self.rows, self.tokens, self.head, self.compute = rows, tokens, head, compute
        self.bias, self.outer, self.factors = None, None, []
        self.column = temperature.to(compute)[:, None] if isinstance(temperature, Tensor) else temperature

    @property
    def may_be_infinite(self) -> bool:
        return True

    def operand(self, v: slice, passing: bool = False) -> Operands:
        return ()

    def logits(self, w: Operands, v: slice, out: Tensor) -> Tensor:
        first = self.head.vocab_start
        return out.copy_(self.rows.read(self.tokens, slice(first + v.start, first + v.stop))).div_(self.column)


def flatness(z: Tensor, outer: float | Tensor) -> Tensor:
    """The derivative 1 - tanh² of outer·tanh(...) from its value z; 0 at masked entries."""
    return (z / outer).clamp_(min=-1.0).square_().neg_().add_(1.0)


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, terms)


def of_tokens(x: Any, tokens: Tensor | None) -> Any:
    """A column (C, 1) for some of its tokens; a number, or None, which all tokens share, as it is."""
    return x[tokens] if tokens is not None and isinstance(x, Tensor) else x


def _flat(x: float | Tensor) -> float | Tensor:
    return x.squeeze(1) if isinstance(x, Tensor) else x


def weight_sum(
    weight: Weight,
    compute: torch.dtype,
    budget: int,
    autocast: torch.dtype | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Σ_v W_v, or Σ_v weights_v·W_v, (H,), of the rows as the products see them.

    Where they are converted, as many at a time as half of the budget holds.
    """
    weight = weight.detach()
    if isinstance(weight, Tensor) and weight.dtype == compute and autocast is None:
        return weight.sum(0) if weights is None else torch.mv(weight.t(), weights)
    cast = autocast or weight.dtype
    total = torch.zeros(weight.shape[1], dtype=compute, device=weight.device)
    rows = max(1, min(SUMMED, budget // (2 * compute.itemsize * weight.shape[1])))
    for start in range(0, weight.shape[0], rows):
        part = plain(weight[start : start + rows]).to(cast).to(compute)
        total += part.sum(0) if weights is None else torch.mv(part.t(), weights[start : start + rows])
        del part  # before the next one is made
    return total


def finite_(z: Tensor) -> Tensor:
    """z in place, with MASK for -inf; NaN stays: a model that has diverged is seen."""
    return z.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=MASK)


def cap_at(z: Tensor, columns: Tensor, most: float) -> None:
    """z[row, columns[row]] = min(z, most), columns (C, K) that lie in this slice; no synchronisation."""
    width = z.shape[1]
    inside = (columns >= 0) & (columns < width)
    cap = torch.where(inside, most, math.inf).to(z.dtype)
    z.scatter_reduce_(1, columns.clamp(0, width - 1), cap, "amin")


class LabelPlaces:
    """Where the labels of some tokens, (C,), lie, so that a slice finds those that it takes out of its logits."""

    def __init__(self, labels: Tensor) -> None:
        self.labels, self.ordered = labels, None
        if labels.device.type == "cpu":  # elsewhere that would wait for the device
            ids, tokens = labels.sort()
            self.ordered = ids.tolist(), ids, tokens

    def mask(self, z: Tensor, start: int, taken: Tensor | None = None) -> None:
        """z[token, label - start] = MASK for the tokens whose label lies in this slice, which are few.

        taken: (C,), gets what was there, of these tokens.
        """
        width = z.shape[1]
        if self.ordered is not None:
            known, ids, tokens = self.ordered
            own = slice(bisect_left(known, start), bisect_left(known, start + width))
            if own.start < own.stop:
                at = tokens[own], ids[own] - start
                if taken is not None:
                    taken[tokens[own]] = z[at]
                z[at] = MASK
            return
        columns = self.labels - start
        inside = (columns >= 0) & (columns < width)
        index = columns.clamp(0, width - 1)[:, None]
        there = z.gather(1, index)
        if taken is not None:
            torch.where(inside, there[:, 0], taken, out=taken)
        z.scatter_(1, index, torch.where(inside[:, None], MASK, there))
