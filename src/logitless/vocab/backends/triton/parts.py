"""A row's partial accumulations, of which every kernel that reads a part of it leaves one, made one."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import triton
from torch import Tensor

from ....algebra.online_softmax import Accumulation
from . import accumulate_kernels

accumulating: Any = accumulate_kernels  # a launch turns plain numbers into what a kernel's signature says
MERGED = 64  # partial accumulations that one program merges


def flags_of(sums: Set[str]) -> dict[str, bool]:
    """What a kernel is told of the sums over the policy alone."""
    return {"WITH_T": "t" in sums, "WITH_R": "r" in sums, "RANK": "above" in sums, "WITH_SUM": "zsum" in sums}


def flags_of_reference(sums: Set[str], there: bool) -> dict[str, bool]:
    """What a kernel is told of the sums over a reference too."""
    return {"REF": there, "WITH_QE": "qe" in sums}


def accumulation_of(state: Tensor, flags: dict[str, bool]) -> tuple[Accumulation, Tensor | None]:
    """The rows of a running accumulation, (fields, n), and its sum of logits; `above` as a number of their dtype."""
    rows = dict(zip(accumulating.FIELDS, state, strict=False))
    zsum = rows.pop("zsum", None)
    for name, flag in (("t", "WITH_T"), ("r", "WITH_R"), ("above", "RANK"), ("a_ref", "WITH_QE")):
        if not flags[flag]:
            rows.pop(name, None)
    return Accumulation(**rows), zsum if flags["WITH_SUM"] else None


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
