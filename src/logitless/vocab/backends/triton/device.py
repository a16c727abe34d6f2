"""Launches happen on the current device: here that is made the tensors' own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on(device: torch.device) -> AbstractContextManager[Any]:
    """With this device as the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
