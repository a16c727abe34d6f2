"""A bf16 head's product with a few tokens, in fp32, by tiles: no row is converted. docs/decisions/0058"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import library

MOST = 32  # tokens, of more a product in slices costs no more than what it converts
WORTH = 1 << 24  # numbers of a head, for which a machine compiles the library once


def takes(n_tokens: int, head: Tensor) -> bool:
    """Whether the library multiplies so many tokens by a head of bf16 rows on a processor that has tiles."""
    worth = 0 < n_tokens <= MOST and head.numel() >= WORTH and head.stride(1) == 1
    if not worth or torch.compiler.is_compiling() or not library.is_plain(head):
        return False
    found = library.library()
    return found is not None and bool(found.multiplies_tiles())


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
    packed = tokens.new_empty(factor.length, MOST)
    head = library.Head(ctypes.pointer(factor), 1, packed=packed.data_ptr())
    library.run(library.library().multiply_few, library.OfFew(head, n, len(rows), out.data_ptr(), out.stride(0)))
    return out
