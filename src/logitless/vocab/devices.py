"""What a pass may ask of a device: full precision, autocast's dtype, and whether numbers can be waited for."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algebra.costs import DEFAULT_BUDGET, gpu_budget


def full_precision(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off: operands already have the dtype that autocast wants, the rest stays fp32."""
    return torch.autocast(device_type, enabled=False) if has_autocast(device_type) else nullcontext()


def exp_is_fast(x: Tensor) -> bool:
    """Whether its device computes exp in less time than exp2: an Intel processor does, by MKL."""
    return x.device.type == "cpu" and is_intel() and torch.backends.mkl.is_available()


@cache
def is_intel() -> bool:
    """Whether this machine's processor is Intel's."""
    try:
        named = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        named = platform.processor()
    return "GenuineIntel" in named


def has_tf32(x: Tensor) -> bool:
    """Whether its device multiplies fp32 numbers on tensor cores, ten binary digits of each."""
    return _is_nvidia(x, (8, 0))


def moves_blocks(x: Tensor) -> bool:
    """Whether its device moves blocks of a matrix by their descriptors, as Triton's interpreter does on a CPU."""
    return x.device.type == "cpu" or _is_nvidia(x, (9, 0))


def _is_nvidia(x: Tensor, least: tuple[int, int]) -> bool:
    nvidia = x.device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(x.device) >= least


@contextmanager
def tf32_products(wanted: bool) -> Iterator[None]:
    """fp32 products from the first ten binary digits of a mantissa, which is all that an fp16 number has.

    The switch is the whole process's: another thread's fp32 products are such ones as well, as long as this lasts. It
    is set by torch's older name, after which both names can be read: after the newer one, the older one raises.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    changes = wanted and before != "tf32"
    if changes:
        matmul.allow_tf32 = True
    try:
        yield
    finally:
        if changes:
            matmul.allow_tf32 = False
            matmul.fp32_precision = before


def has_bf16_tiles(device_type: str) -> bool:
    """Whether such a device is a CPU that multiplies tiles of bf16 numbers (AMX), as oneDNN does."""
    return device_type == "cpu" and _multiplies_tiles()


@cache
def _multiplies_tiles() -> bool:
    known = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if not torch.backends.mkldnn.is_available() or known is None or not known():
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    asked = getattr(torch.cpu, "_init_amx", None)  # the system, without whose leave a process has no tiles
    return capabilities.get("amx_bf16", True) and asked is not None and asked()


@cache
def has_bf16_pairs() -> bool:
    """Whether this machine's processor multiplies pairs of bf16 numbers, and torch may use it (AVX512-BF16)."""
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and known is not None and known()


@contextmanager
def bf16_products(wanted: bool) -> Iterator[None]:
    """fp32 products on a CPU from operands rounded to bf16, which loses nothing of numbers that are.

    The switch is the whole process's, as that of `tf32_products`. Whoever has set it keeps what was set.
    """
    onednn: Any = torch.backends.mkldnn  # whose types lack `matmul`
    changes = wanted and onednn.matmul.fp32_precision == "none"
    if changes:
        onednn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        if changes:  # even after another thread has: what both have found
            onednn.matmul.fp32_precision = "none"


def has_autocast(device_type: str) -> bool:
    """Whether autocast knows this kind of device; it does where a caller is compiled: torch 2.11 cannot ask there."""
    return torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """The dtype that autocast multiplies in, None where it is off or has no say."""
    kind = hidden.device.type
    if hidden.dtype == torch.float64 or not has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def default_budget(device: torch.device) -> int:
    """Bytes of slices where a call names none, by how much memory its device has in all."""
    if device.type != "cuda":
        return DEFAULT_BUDGET
    return gpu_budget(torch.cuda.get_device_properties(device).total_memory)


def processors(device: torch.device) -> int:
    """How many a GPU has, 0 for another device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which nothing may wait for the device."""
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
