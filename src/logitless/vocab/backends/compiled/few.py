"""A bf16 head's product with a few tokens, in fp32, by tiles: no row is converted. docs/decisions/0058"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ...call.compiled_support import compiler, why_not
from . import library

MOST = 32  # tokens; more of them make a conversion cost little beside their product
WORTH = 1 << 24  # numbers of a head, for which a machine compiles the library once


def takes(n_tokens: int, hidden: Tensor, weight: Tensor) -> bool:
    """Whether the library multiplies so many tokens by bf16 rows, on a processor that has tiles for it."""
    worth = 0 < n_tokens <= MOST and weight.numel() >= WORTH and weight.stride(1) == 1
    if not worth or torch.compiler.is_compiling() or not all(map(library.is_plain, (hidden, weight))):
        return False
    if hidden.device.type != "cpu" or not _can_be_had(compiler()):
        return False
    found = library.library()
    return found is not None and bool(found.multiplies_tiles())


@cache
def _can_be_had(compiler: str) -> bool:
    """Whether the library lies on the disk, or this compiler can make it: looked for once a process."""
    return library.is_made() or why_not("cpu") is None


def nbytes(size: int) -> int:
    """Of packed tokens with so many numbers, and of each thread's rows."""
    found = library.library()
    length = found.pairs_of(size)
    return 4 * (found.lanes() * length + torch.get_num_threads() * found.entries() * (found.lanes() + length))


def product_of_few(tokens: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """tokens @ rows.t() into `out`, fp32; tokens (n, H) bf16 numbers in fp32, rows (V, H) bf16. Raises MemoryError."""
    (n, size), tokens = tokens.shape, tokens.contiguous()
    factor = library.Factor(
        tokens=tokens.data_ptr(),
        tokens_stride=size,
        entries=rows.data_ptr(),
        entries_stride=rows.stride(0),
        size=size,
        half=True,
        pairs=True,
    )
    found = library.library()
    packed = tokens.new_empty(factor.length, found.lanes())
    head = library.Head(ctypes.pointer(factor), 1, packed=packed.data_ptr())
    library.run(found.multiply_few, library.OfFew(head, n, len(rows), out.data_ptr(), *out.stride()))
    return out
