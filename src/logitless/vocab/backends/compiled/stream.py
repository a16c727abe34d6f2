"""Values of a plain head by one function in C++, which adds logits up while they are in registers: none are stored.

It is compiled at its first call, and kept on disk beside what torch compiles. docs/decisions/0051
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....algebra.costs import STREAM_TOKENS, Slices
from ....algebra.online_softmax import EMPTY, MASK, Accumulation, merge
from ....algebra.stats import best_entries, sums_of
from ....hashes import hash_of
from ...call.call import Call
from ...call.compiled_support import PATIENCE, compiler
from ...devices import is_intel
from ...head.quantised import plain
from ..base import Chunk, Partial
from ..logits import multiplies_tiles
from .kernels import is_plain

SOURCE = Path(__file__).with_name("stream.cpp")
FLAGS = {"AVX512": ("-mavx512f", "-mavx2", "-mfma"), "AVX2": ("-mavx2", "-mfma")}  # by what torch says of a processor
OPTIONS = ("-O2", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")  # more optimisation spills the sums
NUMBERS = (f"-DEMPTY={EMPTY}f", f"-DMASK={MASK}f")
FIELDS = ("m", "rest", "t", "above", "zsum")  # what it finds of each token and part of the vocabulary
SUMS = frozenset(FIELDS[2:])
FEW = 32  # tokens, of fewer a product in slices takes as long

_lock = threading.Lock()


def takes(call: Call) -> bool:
    """Whether it computes a call's values: of fp32 or bf16 rows alone."""
    i, head, options = call.inputs, call.head, call.options
    weight, sums = head.weight, sums_of(options.want)
    if not isinstance(weight, Tensor) or head.bias is not None or head.softcap or i.lora_b is not None:
        return False
    if call.reference is not None or call.reference_rows is not None or best_entries(sums, options.top_k):
        return False
    if call.shard is not None:  # ranks are to take the same chunks, whatever their processors
        return False
    cast = options.autocast or weight.dtype
    exact = cast == weight.dtype in (torch.float32, torch.bfloat16) and call.compute == torch.float32
    if not exact or multiplies_tiles(i.hidden, cast, call.compute) or weight.stride(1) != 1 or not sums <= SUMS:
        return False
    return call.n_tokens >= FEW and is_plain(i.hidden) and is_plain(weight.detach())


def slices(call: Call, n_tokens: int) -> Slices | None:
    """The chunks of a call that it takes; None of others, and where the budget has no room for a few tokens.

    None on Intel's processors, too, where nobody has compared it with their own library of products.
    """
    found = library() if takes(call) and not is_intel() else None
    if found is None:
        return None
    size, lanes, numbers = call.head.hidden_size, found.lanes(), call.compute.itemsize
    own = numbers * torch.get_num_threads() * found.entries() * (size + lanes)
    each = numbers * (size + (len(FIELDS) + 1) * found.parts())
    most = min(STREAM_TOKENS["cpu"], (call.budget - own) // each // lanes * lanes)
    if most < lanes:
        return None
    tokens = min(n_tokens, -(-n_tokens // -(-n_tokens // most) // lanes) * lanes)
    return Slices(tokens, call.head.rows, own + -(-tokens // lanes) * lanes * each, in_products=True)


def accumulate(chunk: Chunk) -> Partial:
    """`Backend.accumulate_local` of a chunk whose slices `slices` gave."""
    found, factor = library(), chunk.policy.factors[0]
    assert found is not None
    hidden, weight = factor.rows.contiguous(), plain(factor.entries)
    tokens, size = hidden.shape
    width = -(-tokens // found.lanes()) * found.lanes()
    labels, label_logit = chunk.inputs.labels, chunk.label_logit if "above" in chunk.sums else None
    if labels is not None:
        labels = labels.long().contiguous()
    packed = chunk.scratch.take("tokens", (size, width))
    sums = chunk.scratch.take("sums", (len(FIELDS) * found.parts(), width)).view(len(FIELDS), -1, width)
    failed = found.accumulate(
        *(hidden.data_ptr(), hidden.stride(0), weight.data_ptr(), weight.stride(0), weight.dtype == torch.bfloat16),
        *(tokens, weight.shape[0], size, _address(labels), _address(label_logit), packed.data_ptr(), sums.data_ptr()),
        *("t" in chunk.sums, "above" in chunk.sums, chunk.sums_logits, torch.get_num_threads()),
    )
    if failed:
        raise MemoryError("no memory for a thread's rows of the head")
    return _partial(chunk, dict(zip(FIELDS, sums[:, :, :tokens], strict=True)))


def _partial(chunk: Chunk, sums: dict[str, Tensor]) -> Partial:
    """What the parts of the vocabulary, (parts, C) each, amount to."""
    state = Accumulation(sums["m"], sums["rest"])
    state.t = sums["t"] if "t" in chunk.sums else None
    state.above = sums["above"].long() if "above" in chunk.sums else None
    while len(state.m) > 1:
        half = len(state.m) // 2
        first, second = ({name: x[some] for name, x in state.items()} for some in (slice(half), slice(half, None)))
        state = merge(Accumulation(**first), Accumulation(**second), torch)
    state = Accumulation(**{name: x[0] for name, x in state.items()})
    return Partial(state, lambda totals: {}, sums["zsum"].sum(0) if chunk.sums_logits else None)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def library() -> Any:
    """The compiled function with its sizes; None, said once, where this processor or its compiler has none."""
    with _lock:
        return _library(compiler(), torch.backends.cpu.get_cpu_capability())


@cache
def _library(compiler: str, processor: str) -> Any:
    if processor not in FLAGS:
        return None
    try:
        return _load(_compiled([*shlex.split(compiler), *OPTIONS, *NUMBERS, *FLAGS[processor]]))
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"backend 'compiled': {compiler} could not compile a product, slices of logits are made instead ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compiled(command: list[str]) -> Path:
    """The library that this command makes of the source: from the disk where it was made before."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "logitless"
    key = hash_of("\0".join([*command, SOURCE.read_text(encoding="utf-8")]).encode())
    place = folder / f"{key}.so"
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own, place.name)
            done = [*command, "-o", str(made), str(SOURCE)]
            subprocess.run(done, check=True, capture_output=True, text=True, timeout=PATIENCE)
            os.replace(made, place)
    return place


def _load(place: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(place))
    address, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    found.accumulate.argtypes = [
        *(address, number, address, number, flag),
        *(number, number, number, address, address, address, address),
        *(flag, flag, flag, flag),
    ]
    for size in (found.lanes, found.parts, found.entries):
        size.restype = number
    return found
