"""Launches happen on the current device: here that is made the tensors' own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def processors(device: torch.device) -> int:
    """How many the device has, 0 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def on(device: torch.device) -> AbstractContextManager[Any]:
    """With this device as the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
