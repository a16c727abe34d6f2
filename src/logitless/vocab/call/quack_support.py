"""Whether QuACK's loss can run here and serve a call, said without loading it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ...algebra.costs import QUACK_TILE
from ...errors import BackendError
from ...versions import version_of
from ..devices import capturing
from .call import Call

NAME, PACKAGE, FUNCTION = "quack", "quack-kernels", "linear_cross_entropy"
LEAST = (0, 6, 2)  # the first version with `scaled_exp_linear_cross_entropy_fwd`
HOPPER = (9, 0)  # compute capability: its kernels are written for this one, not for later ones
FOLDERS = {"site-packages", "dist-packages"}  # by which it tells the functions of other packages from its own
ALIGNED, ALIGNED_BYTES = 8, 16  # numbers of a row that its copies read at a time, and bytes
Conditions = Iterable[tuple[bool, str, object]]


def why_not(device: torch.device | str) -> str | None:
    """The reason why it cannot run on this device, None where it can; "cuda" is the current one."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    found, need = installed(), ".".join(map(str, LEAST))
    if found is None:
        return f"{PACKAGE} is not installed: pip install {PACKAGE}"
    if tuple(int(x) for x in found.split(".")[:3] if x.isdecimal()) < LEAST:
        return f"it needs {PACKAGE} {need} or later, got {found}: pip install --upgrade {PACKAGE}"
    if (folder := misplaced()) is not None:
        return f"it takes CUTLASS for its own, and fails, but in a folder named site-packages, got {folder}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU, got one of ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        have, need = (".".join(map(str, x)) for x in (capability, HOPPER))
        return f"it needs compute capability {need}, got {have}"
    return None


@cache
def installed() -> str | None:
    """Its version, None where it is not installed; a process asks once, since files are read for it."""
    return version_of(PACKAGE)


@cache
def misplaced() -> str | None:
    """Where CUTLASS's Python package lies, if QuACK takes it for its own there; asked once, and not imported."""
    spec = find_spec("cutlass")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((place for place in places if not FOLDERS & set(Path(place).parts)), None)


def check_loss(reduction: str, weight: Tensor | None, label_smoothing: float, z_loss: float) -> None:
    """Raise BackendError for an option of `linear_cross_entropy` that it does not have."""
    _check(
        [
            (reduction != "none", "reduction 'mean' or 'sum'", repr(reduction)),
            (weight is None, "no class weights", "some"),
            (not label_smoothing, "label_smoothing 0", label_smoothing),
            (not z_loss, "z_loss 0", z_loss),
        ]
    )


def check_call(call: Call) -> None:
    """Raise BackendError for what it cannot do of a call: its head, tensors or options."""
    _check(_conditions(call))


def _check(conditions: Conditions) -> None:
    for held, expected, got in conditions:
        if not held:
            raise BackendError(f"backend {NAME!r}: expected {expected}, got {got}; leave backend out")


def _conditions(call: Call) -> Conditions:
    """(whether it holds, what is expected, what was got) of each condition."""
    head, i, o = call.head, call.inputs, call.options
    weight, rows, width = head.weight_tensor, head.padded_rows, head.hidden_size
    yield o.want == ("logprob",), "cross-entropy alone", f"want={o.want}"
    beside = {
        "top_k": o.top_k > 0,
        "candidates": i.candidates is not None,
        "sampling_mask": call.sampling_mask is not None,
    }
    yield not any(beside.values()), "cross-entropy alone", ", ".join(x for x, given in beside.items() if given)
    yield i.temperature is None, "temperature 1", "one for each token"
    yield o.temperature == 1, "temperature 1", o.temperature
    yield head.shard is None, "a whole head", "one that is sharded over ranks"
    yield head.bias is None, "a head without bias", "one that has it"
    yield not head.adapters, "a head without adapters", f"{len(head.adapters)}"
    yield not head.softcap, "a head without softcap", head.softcap
    yield head.scale == 1, "a head of scale 1", head.scale
    yield head.sparse is None, "a head without sparse", "a SparseBackward"
    yield head.rows == rows, "a head all of whose rows exist", f"vocab_size {head.rows} of {rows}"
    yield weight is not None, "a weight of plain numbers", "a quantised one"
    for name, x in (("hidden states", i.hidden), ("a weight", i.weight)):
        if x is not None:
            yield x.dtype == torch.bfloat16, f"{name} in torch.bfloat16", x.dtype
    if weight is not None:
        yield weight.is_contiguous(), "a contiguous weight", "one with gaps between its numbers"
        at = weight.data_ptr() % ALIGNED_BYTES
        yield at == 0, f"a weight at a multiple of {ALIGNED_BYTES} bytes", f"one {at} bytes past it"
    yield rows % QUACK_TILE == 0, f"a vocabulary that {QUACK_TILE} divides", f"{rows} entries"
    yield width % ALIGNED == 0, f"a hidden size that {ALIGNED} divides", width
    yield not capturing(i.hidden), "no CUDA graph", "one being captured"
