"""Where a command computes, and what slices of the logits may take there."""

from __future__ import annotations

import torch

from ...errors import DeviceError
from ...vocab.face import default_budget


def device_of(asked: str, rank: int = 0) -> torch.device:
    """--device as torch's, of this rank; DeviceError for a GPU that torch does not see."""
    seen = torch.cuda.is_available()
    if asked == "cuda" and not seen:
        raise DeviceError("--device cuda: this torch sees no GPU; use --device cpu")
    return torch.device("cuda", rank % torch.cuda.device_count()) if seen and asked != "cpu" else torch.device("cpu")


def budget_on(asked: str) -> int:
    """The library's own bytes of slices on that --device."""
    return default_budget(device_of(asked))
