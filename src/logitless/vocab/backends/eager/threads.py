"""Sums over a slice's entries of which each thread of a CPU takes those that it has in its cache. docs/decisions/0041

Torch gives each thread an even share of the memory that an element-wise operation goes through: of logits in columns
some of the entries. A sum over entries it shares out by tokens, and a product by whatever suits a product, so that each
thread waits for what another has written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..chunk import lies_in_columns
from ..logits import FEW

SHARE = 1 << 15  # numbers that an element-wise operation of torch has for a thread at least
THREADS = range(2, 5)  # with how many each gets a share of a product's terms
TOKENS = range(FEW + 1, 513)  # of a product that is shared out so
TERMS = 512  # of a share at least


def maxima(z: Tensor) -> Tensor:
    """z.amax(1)"""
    return _by_thread(torch.amax, z)


def sums(z: Tensor) -> Tensor:
    """z.sum(1)"""
    return _by_thread(torch.sum, z)


def _by_thread(reduce: Callable[[Tensor, int], Tensor], z: Tensor) -> Tensor:
    shares = min(torch.get_num_threads(), z.numel() // SHARE)
    if z.device.type != "cpu" or not lies_in_columns(z) or shares < 2 or z.shape[1] % shares:
        return reduce(z, 1)
    return in_parts(reduce, z, (shares, -1))


def in_parts(reduce: Callable[[Tensor, int], Tensor], z: Tensor, parts: tuple[int, int]) -> Tensor:
    """reduce(z, 1), each part of the entries first; parts: how many, and the entries of each."""
    return reduce(reduce(z.t().unflatten(0, parts), 1), 0)


def share_count(tokens: int, terms: int, dtype: torch.dtype, device: torch.device) -> int:
    """Of how many threads each has a sum of its own, of a product for so many tokens of so many terms; 0: of none."""
    threads = torch.get_num_threads()
    shared = threads in THREADS and tokens in TOKENS and terms >= threads * TERMS
    return threads if shared and device.type == "cpu" and dtype == torch.float32 else 0


def shares_of(total: Tensor | None, terms: int) -> Tensor | None:
    """Zeros (T, C, H) for what each thread adds to `total`, (C, H), in products of so many terms; or `total` itself."""
    if total is None:
        return total
    count = share_count(len(total), terms, total.dtype, total.device)
    return total.new_zeros(count, *total.shape) if count else total


def collect(shares: Tensor | None, total: Tensor | None) -> None:
    """Add to `total` what `shares_of` it have got."""
    if shares is not None and total is not None and shares is not total:
        for share in shares:
            total += share
