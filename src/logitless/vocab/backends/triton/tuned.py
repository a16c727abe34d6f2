"""Launch sizes: a data file per GPU in `sizes/`, `default` where there is none, `interpreter` on a CPU."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import torch

Sizes = dict[str, int]


@cache
def table(name: str) -> dict[str, Any]:
    """The sizes for a device of this name, such as "NVIDIA H200" (`sizes/nvidia-h200.json`)."""
    folder = files("logitless.vocab.backends.triton") / "sizes"
    file = folder / f"{name.lower().replace(' ', '-')}.json"
    return json.loads((file if file.is_file() else folder / "default.json").read_text("utf-8"))


def table_for(device: torch.device) -> dict[str, Any]:
    """The sizes for a device."""
    return table("interpreter" if device.type == "cpu" else torch.cuda.get_device_name(device))


def launch(sizes: Sizes) -> dict[str, Any]:
    """The part of a kernel's sizes that its launch takes; and fused multiply-adds, to be asked for from Triton 3.10."""
    return {"num_warps": sizes["warps"], "num_stages": sizes["stages"], "enable_fp_fusion": True}
