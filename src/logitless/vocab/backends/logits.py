"""Slices of logits: one head's product with a block of tokens, written into a reused buffer."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cache, reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ...algebra.online_softmax import MASK
from ..call.rows_of_reference import RowsOfReference
from ..devices import bf16_products, exp_is_fast, has_bf16_tiles, is_intel
from ..head.lm_head import LMHead, place
from ..head.quantised import Weight, plain
from ..sizing import current_sizing
from .compiled import few
from .compiled.library import in_pairs


def has_out_dtype(device_type: str) -> bool:
    """Whether products of bf16 operands come, and are added up, in fp32 on this kind of device."""
    sized = current_sizing()
    return _multiplies_wide(device_type) if sized is None else sized.wide_products


@cache
def _multiplies_wide(device_type: str) -> bool:
    if device_type != "cuda":
        return False
    try:
        with unset_fake_temporarily():  # fake tensors, of a graph that is traced, multiply anything
            x = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
            add_product(x, x, torch.mm(x, x, out_dtype=torch.float32))
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:  # a torch without CUDA asserts
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "ALLOC_FAILED" in str(error):
            raise  # which says nothing about products: the next call asks again
        return False
    return True


def operand_dtype(hidden: Tensor, weight: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The dtype that the GEMM's operands have: their own where products come out in fp32, else the compute dtype."""
    return hidden.dtype if are_half(hidden, weight) and has_out_dtype(hidden.device.type) else compute


def are_half(hidden: Tensor, weight: torch.dtype) -> bool:
    """Whether both operands have 16 bits, the same ones."""
    return hidden.dtype == weight and weight in (torch.bfloat16, torch.float16)


def logits_grad_dtype(operand: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """What dL/dz is rounded to for its products: as the operands, but fp16 has no room for what a mean makes of p."""
    return compute if operand == torch.float16 else operand


def multiplies_tiles(hidden: Tensor, weight: torch.dtype, compute: torch.dtype) -> bool:
    """Whether a CPU multiplies these operands of bf16 in tiles, with sums in fp32. docs/decisions/0049 and 0058"""
    return hidden.dtype == weight == torch.bfloat16 and compute == torch.float32 and has_bf16_tiles(hidden.device.type)


LOG2E = math.log2(math.e)
FEW, CHAIN = 32, 8192  # rows whose products MKL may add up one after another, and how many it gets at a time
SUMMED = 4096  # rows of a weight that are converted at a time, at most
SOME, LONG = range(2, 129), 256  # rows of a product, and terms of each sum, that a CPU adds up faster in columns
PIECE, NARROW = 2048, 512  # columns at a time; a product with fewer than NARROW is made in rows
PARTS = 16  # of the columns of a product with one row
CUT, BLOCK = ("cuda",), 8  # devices whose library multiplies whole blocks of so many numbers, and slowly what is left


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
        """`logits` of a few tokens, by the head's rows as they lie: see `compiled.few`."""
        first, *others = self.factors
        pairs = in_pairs(first.is_bf16)
        few.product_of_few(first.tokens if pairs else first.rows, plain(first.entries)[v], out, pairs)
        if pairs and first.scaled:  # as its rows are, but not its tokens, which are bf16 numbers
            out.mul_(self.inner)
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


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into `out`, with `out`'s precision."""
    cut = _cut(a, b, out)
    if cut is not None:
        for adds, parts in cut:
            (add_product if adds else product)(*parts)
        return out
    if a.dtype == out.dtype:
        if _is_chained(out) and a.shape[1] > CHAIN:
            return add_product(a, b, out.zero_())
        if len(a) == 1 and _is_plain_fp32(out):
            return product_of_one(a, b, out)
        return product_in_columns(a, b, out) if _faster_in_columns(a, out) else torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def product_of_one(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into `out`, of one row, as a batch of parts: MKL multiplies by a vector slowly, and with one thread.

    As many parts for any number of threads, so that all give the same bits. docs/decisions/0056
    """
    parts = min(PARTS, out.shape[1])
    size = out.shape[1] // parts
    whole = parts * size
    of_parts = b[:, :whole].t().unflatten(0, (parts, size))
    torch.bmm(of_parts, a.t().expand(parts, -1, 1), out=out[0, :whole].view(parts, size, 1))
    if whole < out.shape[1]:
        torch.mm(a, b[:, whole:], out=out[:, whole:])
    return out


def product_in_columns(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into `out` as the transpose of bᵀ @ aᵀ, a few columns of `out` at a time."""
    for start in range(0, out.shape[1], PIECE):
        some = slice(start, start + PIECE)
        out[:, some].copy_(torch.mm(b[:, some].t(), a.t()).t())
    return out


def _faster_in_columns(a: Tensor, out: Tensor) -> bool:
    """Whether a CPU multiplies some rows with many columns so slowly in rows that a transposition pays.

    docs/decisions/0040, and 0048 for Intel's, which does not
    """
    some = len(a) in SOME and a.shape[1] >= LONG and out.shape[1] >= NARROW
    return some and a.stride(1) == 1 and _is_plain_fp32(out)


def _is_plain_fp32(out: Tensor) -> bool:
    """Whether `out` is fp32 on a CPU, its rows in one piece, and the processor not Intel's, whom MKL is for."""
    return out.dtype == torch.float32 and out.device.type == "cpu" and out.stride(1) == 1 and not is_intel()


def add_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out += a @ b, accumulated in `out`'s precision; of several matrices in `out` each gets a share of the terms."""
    if out.dim() == 3:
        shares = len(out) if a.shape[1] % len(out) == 0 else 1
        parts = a.unflatten(1, (shares, -1)).transpose(0, 1), b.unflatten(0, (shares, -1))
        return out[:shares].baddbmm_(*parts)
    cut = _cut(a, b, out)
    if cut is not None:
        for _, parts in cut:
            add_product(*parts)
        return out
    if a.dtype == out.dtype:
        if not _is_chained(out):
            return out.addmm_(a, b)
        for start in range(0, a.shape[1], CHAIN):
            part = slice(start, start + CHAIN)
            out += a[:, part] @ b[part]
        return out
    return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def _cut(a: Tensor, b: Tensor, out: Tensor) -> list[tuple[bool, tuple[Tensor, Tensor, Tensor]]] | None:
    """A product in whole blocks and in what is left, and whether each adds to the one before; None where it is whole.

    A GPU's library multiplies matrices whose rows of numbers do not end with a block six times as slowly, even where
    the next row begins with one: docs/decisions/0045.
    """
    if out.device.type not in CUT:
        return None
    (rows, depth), columns = a.shape, b.shape[1]
    if _is_ragged(columns, b.stride(1), out.stride(1)):
        return [(False, (a, b[:, some], out[:, some])) for some in _whole_and_left(columns)]
    if _is_ragged(rows, a.stride(0), out.stride(0)):
        return [(False, (a[some], b, out[some])) for some in _whole_and_left(rows)]
    if _is_ragged(depth, a.stride(1), b.stride(0)):
        return [(some.start > 0, (a[:, some], b[some], out)) for some in _whole_and_left(depth)]
    return None


def _whole_and_left(size: int) -> tuple[slice, slice]:
    edge = size // BLOCK * BLOCK
    return slice(0, edge), slice(edge, size)


def _is_ragged(size: int, *strides: int) -> bool:
    """Whether numbers that lie side by side end within a block."""
    return size > BLOCK and size % BLOCK > 0 and 1 in strides


def _is_chained(out: Tensor) -> bool:
    """Whether each product could be rounded at the size of all before it, which long chains do not bear."""
    return out.device.type == "cpu" and len(out) <= FEW


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
