"""A row's partial accumulations, of which every kernel that reads a part of it leaves one, made one."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from . import accumulate_kernels

accumulating: Any = accumulate_kernels  # a launch turns plain numbers into what a kernel's signature says
MERGED = 64  # partial accumulations that one program merges


def merge(state: Tensor, flags: dict[str, bool]) -> Tensor:
    """(fields, parts, n) -> (fields, 1, n)."""
    fields, parts, n = state.shape
    while parts > 1:
        group = min(parts, MERGED)
        count = triton.cdiv(parts, group)
        out = torch.empty(fields, count, n, dtype=state.dtype, device=state.device)
        accumulating.merge_parts[(triton.cdiv(n, 16), count)](
            state, out, n, parts, count, group, **flags, PARTS=triton.next_power_of_2(group), ROWS=16
        )
        state, parts = out, count
    return state
