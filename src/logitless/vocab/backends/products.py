"""Matrix products into a buffer, with its precision, by whichever of torch's ways is the fastest on a device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..devices import is_intel
from ..sizing import current_sizing

FEW, CHAIN = 32, 8192  # rows whose products MKL may add up one after another, and how many it gets at a time
SOME, LONG = range(2, 129), 256  # rows of a product, and terms of each sum, that a CPU adds up faster in columns
PIECE, NARROW = 2048, 512  # columns at a time; a product with fewer than NARROW is made in rows
PARTS = 16  # of the columns of a product with one row
CUT, BLOCK = ("cuda",), 8  # devices whose library multiplies whole blocks of so many numbers, and slowly what is left


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
