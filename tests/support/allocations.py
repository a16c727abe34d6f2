"""Measuring what a piece of torch code allocates, byte for byte, without a GPU.

    largest_allocation(fn)   bytes of the largest single storage that fn() created
    peak_new_bytes(fn)       most bytes alive at once among the storages that fn() created
    trace_allocations(fn)    both, and what is still alive when fn returns: saved for backward, or its result

Every operator's output is seen, in forward and in backward. Scratch memory inside one operator is not.

    poison(setattr)          makes uninitialised memory hold values that no result can hide
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from logitless.resident import AllocationTracker


@dataclass(frozen=True)
class Allocations:
    result: Any
    largest: int  # bytes
    peak: int  # bytes
    kept: int  # bytes still alive when fn returned, its result included


def trace_allocations(fn: Callable[[], Any]) -> Allocations:
    with AllocationTracker() as tracker:
        result = fn()
        return Allocations(result, tracker.largest, tracker.peak, tracker.live)


def largest_allocation(fn: Callable[[], Any]) -> int:
    return trace_allocations(fn).largest


def peak_new_bytes(fn: Callable[[], Any]) -> int:
    return trace_allocations(fn).peak


UNINITIALISED = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def poison(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Fill what torch leaves uninitialised: NaN, large integers. `put`: `setattr`, or a monkeypatch's."""
    for owner, name in UNINITIALISED:
        put(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = create(*args, **kwargs)
        if out.is_floating_point() or out.is_complex():
            return out.detach().fill_(float("nan")).requires_grad_(out.requires_grad)
        return out if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).max // 2)

    return poisoned
