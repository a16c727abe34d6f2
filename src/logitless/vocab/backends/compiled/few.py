"""A head's product with a few tokens, in fp32, by its rows as they lie. docs/decisions/0058 and 0061"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ...call.compiled_support import compiler, why_not
from ...devices import is_intel
from . import library

MOST = 32  # tokens; more of them make a conversion, or packed rows, cost little beside their product
WORTH = 1 << 24  # numbers of a head, for which a machine compiles the library once


def takes(n_tokens: int, hidden: Tensor, weight: Tensor) -> bool:
    """Whether the library multiplies so many tokens by these rows, of fp32 or bf16.

    On a processor of Intel, whose own library torch multiplies by, only by tiles of bf16; nowhere one token by fp32
    rows, which torch multiplies as fast.
    """
    least = 2 if weight.dtype == torch.float32 else 1
    worth = least <= n_tokens <= MOST and weight.numel() >= WORTH and weight.stride(1) == 1
    if not worth or torch.compiler.is_compiling() or not all(map(library.is_plain, (hidden, weight))):
        return False
    if hidden.device.type != "cpu" or not _can_be_had(compiler()):
        return False
    found = library.library()
    if found is None:
        return False
    in_tiles = found.multiplies_tiles() and hidden.dtype == weight.dtype == torch.bfloat16
    return bool(in_tiles) or not is_intel()


@cache
def _can_be_had(compiler: str) -> bool:
    """Whether the library lies on the disk, or this compiler can make it: looked for once a process."""
    return library.is_made() or why_not("cpu") is None


def nbytes(size: int, are_bf16: bool) -> int:
    """Of packed tokens with so many numbers, and with tiles of each thread's rows; nothing of operands in fp32."""
    if not library.in_pairs(are_bf16):
        return 0
    found = library.library()
    length, rows = found.pairs_of(size), torch.get_num_threads() * found.entries() * found.multiplies_tiles()
    return 4 * (found.lanes() * length + rows * (found.lanes() + length))


def product_of_few(tokens: Tensor, rows: Tensor, out: Tensor, pairs: bool) -> Tensor:
    """tokens @ rows.t() into `out`, fp32; tokens (n, H) in fp32, rows (V, H) in fp32 or bf16. Raises MemoryError.

    pairs: whether the tokens' numbers are bf16, too, and multiplied by two numbers at a time.
    """
    (n, size), tokens, found = tokens.shape, tokens.contiguous(), library.library()
    factor = library.Factor(
        tokens=tokens.data_ptr(),
        tokens_stride=size,
        entries=rows.data_ptr(),
        entries_stride=rows.stride(0),
        size=size,
        half=rows.dtype == torch.bfloat16,
        pairs=pairs,
    )
    packed = tokens.new_empty(factor.length if pairs else 0, found.lanes())
    head = library.Head(ctypes.pointer(factor), 1, packed=packed.data_ptr())
    library.run(found.multiply_few, library.OfFew(head, n, len(rows), out.data_ptr(), *out.stride()))
    return out
