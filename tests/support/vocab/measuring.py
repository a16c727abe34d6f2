"""Flops of matrix products and bytes of allocations, seen by torch's profiler: inside custom operators too."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
from torch.autograd.profiler import profile

not_interpreted = pytest.mark.not_on(
    "triton", reason="a call large enough to measure takes minutes under the interpreter, whose casts take room"
)

# name: where the two factors stand among the arguments
PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::mv": (0, 1),
    "aten::dot": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2),
    "aten::addmv": (1, 2),
    "aten::addmv_": (1, 2),
}


@dataclass(frozen=True)
class Measured:
    result: Any
    flops: int  # of matrix products
    products: int  # how many
    largest: int  # bytes of the largest allocation, 0 where memory is not measured
    peak: int  # most bytes alive at once, above those alive before


def measure(fn: Callable[[], Any], memory: bool = False) -> Measured:
    fn()  # whatever is made once and kept
    with profile(use_cpu=True, record_shapes=True, profile_memory=memory) as p:
        result = fn()
    flops = products = live = peak = largest = 0
    for event in p.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak, largest = max(peak, live), max(largest, event.nbytes())
        elif event.name() in PRODUCTS:
            left, right = (event.shapes()[i] for i in PRODUCTS[event.name()])
            flops += 2 * prod(left) * (right[-1] if len(right) > 1 else 1)
            products += 1
    return Measured(result, flops, products, largest, peak)
