"""Functions of named tensors, compiled by TorchInductor's C++ for all sizes at once; plain where that is not possible.

A function is traced once for each set of tensors that it gets and each dtype, and compiled without Dynamo: no guards
are checked in a call, and nothing is compiled again for other sizes, numbers of threads or gradient modes. Torch keeps
what it compiled on disk, so that another process only loads it.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ....algebra.costs import BLOCK
from ..chunk import lies_in_columns
from ..eager.threads import in_parts
from .library import is_plain

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensors]

SIZES = 1021, 509  # of the tokens and entries that a function is traced with: unlike each other, and like a slice's
OPTIONS: dict[str, Any] = {
    "cpp.dynamic_threads": True,  # one function for every number of threads
    "cpp.enable_floating_point_contract_flag": "fast",  # a product and a sum are one instruction
    "compile_threads": 1,  # in this process: one function is not worth helpers, which would outlive it
}

_lock = threading.Lock()
_compiled: dict[Hashable, Callable[..., Any] | None] = {}


def run(key: Hashable, function: Function, tensors: Tensors) -> Tensors:
    """`function(tensors)`, compiled: which may write into its tensors, all (C,) or (C, S), and returns others.

    key: what, beside the tensors' names and dtypes, tells it from other functions. Plain where it cannot be compiled.
    """
    columns = any(x.dim() == 2 and lies_in_columns(x) for x in tensors.values())
    kernel = _of((key, columns, *((name, x.dtype) for name, x in tensors.items())), function, tensors)
    if kernel is None:
        return function(tensors)
    call, outputs = kernel
    return dict(zip(outputs, call(*(x.contiguous() if x.dim() == 1 else x for x in tensors.values())), strict=True))


def fits(z: Tensor) -> bool:
    """Whether compiled functions may see this slice: a CPU's real numbers, as many as they are traced.

    In rows, or in columns that have whole blocks.
    """
    in_order = z.is_contiguous() or (lies_in_columns(z) and z.shape[1] % BLOCK == 0)
    return is_plain(z) and min(z.shape) > 1 and in_order


def by_block(reduce: Callable[[Tensor, int], Tensor], z: Tensor) -> Tensor:
    """reduce(z, 1), of logits in columns some entries at a time: Inductor's own reads one line of memory a step."""
    return in_parts(reduce, z, (-1, BLOCK)) if lies_in_columns(z) else reduce(z, 1)


def _of(key: Hashable, function: Function, tensors: Tensors) -> Any:
    """The compiled function and its outputs' names, None where it could not be compiled."""
    if key not in _compiled:
        with _lock:
            if key not in _compiled:
                _compiled[key] = _attempt(function, tensors)
    return _compiled[key]


def _attempt(function: Function, tensors: Tensors) -> Any:
    try:
        return build(function, tensors)
    except Exception as error:  # whatever a compiler, a full disk or another torch says
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
        warnings.warn(
            f"backend 'compiled': torch could not compile a function, plain operations compute it ({reason}); "
            'a call with backend="eager" compiles nothing',
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _expm1(x: Tensor) -> Tensor:
    """e^x - 1 by its series near 0, where Inductor's own, a difference, has no digits."""
    terms = 14 if x.dtype == torch.float64 else 7
    series = torch.full_like(x, 1 / math.factorial(terms))
    for i in range(terms - 1, 0, -1):
        series = series * x + 1 / math.factorial(i)
    return torch.where(x.abs() < 0.35, series * x, torch.exp(x) - 1)


EXACTLY: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.expm1.default: _expm1,
    torch.ops.aten.expm1_.default: lambda x: x.copy_(_expm1(x)),
}


def _example(x: Tensor) -> Tensor:
    """A tensor of x's dtype that lies as x does, to trace a function with."""
    tokens, entries = SIZES
    if x.dim() == 1:
        return torch.empty(tokens, dtype=x.dtype)
    if lies_in_columns(x):
        return torch.empty(entries // BLOCK * BLOCK, tokens, dtype=x.dtype).t()
    return torch.empty(tokens, entries, dtype=x.dtype)


def build(function: Function, tensors: Tensors) -> tuple[Callable[..., Any], list[str]]:
    """`function` of tensors that lie as these do, whatever their sizes, compiled, and the names of what it returns."""
    from torch._inductor import standalone_compile
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch.fx.experimental.proxy_tensor import make_fx

    outputs: list[str] = []

    def positional(*given: Tensor) -> list[Tensor]:
        found = function(dict(zip(tensors, given, strict=True)))
        outputs[:] = found
        return list(found.values())

    with torch.no_grad(), torch.inference_mode(False), torch.device("cpu"):  # whatever the caller's default device
        examples = [_example(x) for x in tensors.values()]
        graph = make_fx(positional, decomposition_table=EXACTLY, tracing_mode="symbolic")(*examples)
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        vectors = {"cpp.simdlen": pick_vec_isa().bit_width() or None}  # by these torch tells apart what it keeps
        return standalone_compile(graph, inputs, options={"config_patches": OPTIONS | vectors}), outputs
