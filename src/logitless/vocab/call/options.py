"""The options of a call: as callers write them, and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ..head.lm_head import LMHead
from ..head.sparse import SparseBackward
from .rows_of_reference import RowSource
from .sampling_mask import SamplingMask


class Options(TypedDict, total=False):
    """The options of the pass, shared by `token_stats`, `token_loss` and `explain`; see `token_stats`."""

    want: tuple[str, ...]
    temperature: float | Tensor
    ignore_index: int
    top_k: int
    candidates: Tensor | None
    sampling_mask: SamplingMask | None
    reference: tuple[Tensor, LMHead] | Tensor | RowSource | None
    jsd_beta: float
    memory_budget: int | None
    backend: str | None


DEFAULTS: Options = {
    "want": ("logprob",),
    "temperature": 1.0,
    "ignore_index": -100,
    "top_k": 0,
    "candidates": None,
    "sampling_mask": None,
    "reference": None,
    "jsd_beta": 0.5,
    "memory_budget": None,
    "backend": None,
}


@dataclass(frozen=True)
class CallOptions:
    """The options of a call that are plain numbers and names, checked."""

    want: tuple[str, ...]
    temperature: float = 1.0  # 1 where the call has a temperature for each token
    ignore_index: int = -100
    top_k: int = 0
    jsd_beta: float = 0.5
    memory_budget: int = 0  # bytes of slices; 0 for what the device has room for
    backend: str = "eager"
    named: bool = False  # whether the caller asked for it
    autocast: torch.dtype | None = None  # what autocast multiplies in
    sparse: SparseBackward | None = None  # the head's, where gradients are recorded
