"""A device that is not there: tensors that claim to be on CUDA, and all that is asked of it recorded.

They have no numbers, or live on a CPU where Triton's interpreter runs the kernels. torch's and Triton's own code
decides everything else: which operators run, and how a launch is specialised.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental import _config as symbolic
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.gpu.counts.kernels import Argument, Launch
from bench.gpu.counts.recording import Operator, Product, Recording, Wait

CUDA = torch.device("cuda", 0)
ASKS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "equal")
ASKED: dict[Any, Any] = {
    Tensor.device.__get__: CUDA, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False,
    Tensor.is_meta.__get__: False,
}  # fmt: skip
PRODUCTS = ("mm", "addmm", "addmm_", "mv", "addmv_", "bmm")
GATHERS = {"index_select": 2, "_embedding_bag": 1, "_embedding_bag_forward_only": 1}  # and where ids are given
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "lift_fresh")


class Generator:
    """torch's, which a CPU build makes for a CPU alone."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return _GENERATOR("cpu")


_GENERATOR = torch.Generator


class Claims(TorchFunctionMode):
    """What Python asks of tensors: they say that they are on CUDA; where they have no numbers, every one is 1.

    home: where they live, "meta" or "cpu".
    """

    def __init__(self, recording: Recording, home: str) -> None:
        super().__init__()
        self.recording, self.home = recording, home

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in ASKED and self.lives_at_home(args[0]):
            return ASKED[func]
        name = getattr(func, "__name__", "")
        if name == "get_device":
            return 0
        if func is torch.device:
            return func(*args, **kwargs)
        if name in ASKS:
            asked = Wait(f"{name} at {_caller()}")
            self.recording.add(asked)
            return func(*args, **kwargs) if self.home == "cpu" else self.answer(name, args[0], asked.what)
        if name == "repeat_interleave" and isinstance(args[1], Tensor) and "output_size" not in kwargs:
            asked = Wait(f"{name} at {_caller()}")  # how many that makes
            self.recording.add(asked)
            kwargs |= {"output_size": self.recording.known[asked.what]} if self.home == "meta" else {}
        if name == "cuda":
            return args[0]
        if name == "pin_memory":
            return args[0]
        args = tuple(self.at_home(x) for x in args)
        kwargs = {key: self.at_home(x) for key, x in kwargs.items() if key != "pin_memory"}
        if kwargs.get("out_dtype") is not None:
            return self.wide(func, args, kwargs)
        return func(*args, **kwargs)

    def lives_at_home(self, x: Tensor) -> bool:
        """Whether it is one of those that claim; a meta tensor among those of a CPU stands for nothing else."""
        return self.home == "meta" or x.device.type == "cpu"

    def at_home(self, x: Any) -> Any:
        """The device that a tensor lives on, for one that it says it is on."""
        return self.home if isinstance(x, str | torch.device) and str(x).startswith("cuda") else x

    def answer(self, name: str, x: Tensor, what: str) -> Any:
        """A number that the host asks for."""
        known = self.recording.known.get(what)
        if name == "nonzero":
            found = x.numel() - self.recording.ignored if known is None else known
            return x.new_empty(found, x.dim(), dtype=torch.int64)
        if known is not None:
            return known
        if name == "cpu":
            return x
        if name == "tolist":
            found = _ones(tuple(x.shape))
            return [*found[:-1], 0] if self.recording.ignored else found  # the last says whether all tokens are valid
        return True if name in ("__bool__", "equal") else 1

    def wide(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A product whose result is wider than its operands, which a CPU build of torch does not have."""
        dtype, out = kwargs["out_dtype"], kwargs.get("out")
        start, (a, b) = args[:-2], args[-2:]
        if start and start[0].dtype != dtype:
            raise TypeError(f"addmm: expected what is added to in {dtype}, as out_dtype, got {start[0].dtype}")
        self.recording.add(_product(a, b, dtype.itemsize, adds=func is torch.addmm))
        self.recording.quiet += 1
        try:
            out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype) if out is None else out
            if self.home == "cpu":
                exact = a.to(dtype) @ b.to(dtype)
                out.copy_(exact + start[0] if start else exact)
            return out
        finally:
            self.recording.quiet -= 1


def _ones(shape: tuple[int, ...]) -> Any:
    return [_ones(shape[1:]) for _ in range(shape[0])] if shape else 1


def _product(a: Tensor, b: Tensor, result: int, adds: bool) -> Product:
    columns = b.shape[-1] if b.dim() > 1 else 1
    tf32 = a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return Product(a.shape[:-1].numel(), columns, a.shape[-1], a.dtype.itemsize, result, adds, tf32)


class Operators(TorchDispatchMode):
    """Records what computes something."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in FREE or (isinstance(out, Tensor) and out.numel() == 0):
            return out
        if name in PRODUCTS:
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            adds = name.startswith("add") and kwargs.get("beta", 1) != 0
            self.recording.add(_product(a, b, out.dtype.itemsize, adds))
            return out
        converts = name == "_to_copy" and out.dtype != args[0].dtype
        self.recording.add(Operator(name, _moved(name, args, kwargs, out), converts))
        return out


def _tensors(values: Any) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _moved(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an operator reads and writes; of a table those rows that are asked for."""
    tensors = [*_tensors(args), *_tensors(kwargs.values()), *_tensors([out])]
    if name in GATHERS:
        table, ids = args[0], args[GATHERS[name]]
        row = _touched(table) // table.shape[args[1] if name == "index_select" else 0]
        return ids.numel() * row + sum(_touched(x) for x in tensors if x is not table)
    return sum(_touched(x) for x in tensors)


def _touched(x: Tensor) -> int:
    """Bytes of what it shows: nothing is read twice for being expanded."""
    numbers = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * x.dtype.itemsize


def _caller() -> str:
    """The nearest line of the library that asks."""
    frame = sys._getframe(2)
    while frame is not None and "/logitless/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "the caller"
    return f"{frame.f_code.co_filename.rpartition('/logitless/')[2]}, {frame.f_code.co_name}"


class Event:
    """A mark on a stream, by the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


class Stream:
    """A stream, of which nothing is asked."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...


class Graph:
    """A CUDA graph, whose step has run while it was captured: what it wrote stands there."""

    def replay(self) -> None: ...


@contextmanager
def _capturing(recording: Recording) -> Iterator[None]:
    recording.capturing = True
    try:
        yield
    finally:
        recording.capturing = False


class OnDevice(nullcontext[None]):
    """With a device as the current one."""

    def __init__(self, _: Any) -> None:
        super().__init__()


class Driver:
    """Triton's view of the device."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return CUDA


def _recorder(recording: Recording) -> Callable[..., None]:
    """What takes the place of a kernel's launch."""

    def seen(x: Any) -> Any:
        if isinstance(x, TensorDescriptor):
            return replace(x, base=seen(x.base))
        if not isinstance(x, Tensor):
            return x
        with torch._C.DisableTorchFunction():
            return Argument(x.dtype, x.storage_offset() * x.dtype.itemsize, x.numel())

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, map(seen, args), strict=False)) | {name: seen(x) for name, x in kwargs.items()}
        arguments = {name: given[name] for name in self.arg_names}
        options = {name: x for name, x in given.items() if name not in arguments}
        recording.add(Launch(self, arguments, options, tuple(grid), recording.capturing))

    return run


def _cuda(capability: int, name: str, gib: float, processors: int, recording: Recording) -> dict[str, Any]:
    """What torch.cuda says where such a device is."""
    major, minor, total = capability // 10, capability % 10, int(gib * 2**30)
    properties = SimpleNamespace(
        name=name, total_memory=total, major=major, minor=minor, multi_processor_count=processors
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "default_generators": (torch.default_generator,),  # numbers are drawn where the tensors live
        "get_device_capability": lambda _=None: (major, minor),
        "get_device_name": lambda _=None: name,
        "get_device_properties": lambda _=None: properties,
        "is_current_stream_capturing": lambda: recording.capturing,
        "device": OnDevice,
        "set_device": lambda _: None,
        "_lazy_init": lambda: None,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda _=None: Stream(),
        "synchronize": lambda _=None: None,
        "mem_get_info": lambda _=None: (total, total),
        "memory_allocated": lambda _=None: 0,
        "max_memory_allocated": lambda _=None: 0,
        "memory_reserved": lambda _=None: 0,
        "reset_peak_memory_stats": lambda _=None: None,
        "empty_cache": lambda: None,
        "CUDAGraph": Graph,
        "graph": lambda *_, **__: _capturing(recording),
        "Event": Event,
        "Stream": Stream,
    }


def _plainly(launch: Callable[..., None]) -> Callable[..., None]:
    """The interpreter's launch, which is to see where tensors live."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch(self, *args, **kwargs)

    return run


@contextmanager
def claimed(
    capability: int = 90, name: str = "NVIDIA H200", gib: float = 141, processors: int = 132, home: str = "meta"
) -> Iterator[Recording]:
    """While it lasts a device is there, as far as Python can tell; what is asked of it is in the recording.

    home: "meta", for tensors without numbers, or "cpu", where Triton's interpreter has to be on: kernels then run, and
    of the recording only products and waits are whole.
    """
    if isinstance(triton.language.sum, JITFunction) != (home == "meta"):
        expected = {"meta": "its compiler; unset TRITON_INTERPRET", "cpu": "its interpreter; set TRITON_INTERPRET=1"}
        raise RuntimeError(f"bench.gpu.counts: home {home!r} wants Triton with {expected[home]}")
    recording = Recording()
    backward = BackwardCFunction.apply

    def again(self: Any, *args: Any) -> Any:
        with Claims(recording, home):
            return backward(self, *args)

    with ExitStack() as stack:
        for attribute, value in _cuda(capability, name, gib, processors, recording).items():
            stack.enter_context(patch.object(torch.cuda, attribute, value))
        stack.enter_context(patch.object(torch.cuda.random, "current_device", torch.cuda.current_device))
        stack.enter_context(patch.object(torch, "Generator", Generator))
        stack.enter_context(patch.object(BackwardCFunction, "apply", again))
        if home == "meta":
            stack.enter_context(patch.object(JITFunction, "run", _recorder(recording)))
            stack.enter_context(patch.object(triton.runtime.driver, "_active", Driver(capability)))
            stack.enter_context(patch.object(symbolic, "meta_nonzero_assume_all_nonzero", True))  # of boolean indices
            stack.enter_context(Operators(recording))
        else:
            stack.enter_context(patch.object(GridExecutor, "__call__", _plainly(GridExecutor.__call__)))
        stack.enter_context(Claims(recording, home))
        yield recording
