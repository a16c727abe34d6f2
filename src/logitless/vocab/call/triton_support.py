"""Whether the Triton backend can run here, said without running it."""

from __future__ import annotations

from importlib.util import find_spec

import torch

LEAST = (8, 0)  # compute capability: bf16, and products of it with fp32 results
INTERPRETER = "set TRITON_INTERPRET=1 before triton's first import to have its kernels interpreted, slowly, on a CPU"


def why_not(device: torch.device | str) -> str | None:
    """The reason why kernels cannot run on this device, None where they can; "cuda" is the current one."""
    device = torch.device(device)
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if device.type == "cpu":
        return None if interpreted() else f"it needs a CUDA device, got cpu; {INTERPRETER}"
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:  # launch sizes are for warps of 32 threads, and AMD's may have 64
        return "it needs an NVIDIA GPU, got one of ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST:
        have, need = (".".join(map(str, x)) for x in (capability, LEAST))
        return f"it needs compute capability {need} or more, got {have}"
    return None


def interpreted() -> bool:
    """Whether triton runs its interpreter in this process."""
    from triton import knobs
    from triton.language.standard import sum as probe  # decorated when triton was imported
    from triton.runtime.interpreter import InterpretedFunction

    return knobs.runtime.interpret and isinstance(probe, InterpretedFunction)
