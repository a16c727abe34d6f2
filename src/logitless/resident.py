"""Measured memory: this process's peak, and how much one piece of work adds at its peak."""

from __future__ import annotations

import ctypes
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

INTERVAL = 0.002  # seconds between two looks at the resident set


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: what torch allocated on a GPU, this process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would count what the parent process had when it started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device) -> None:
    """Forgets the peak so far, where the system allows it, so that `peak_bytes` is of what comes next."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        with suppress(OSError):  # a read-only /proc keeps the old peak, which is still true of the process
            Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Gives freed memory that the C library keeps for itself back to the system, where that library is glibc.

    What comes next would else take of it, and the resident set would not show that.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass
class Watch:
    """A `with` block that records memory above its start: `peak` bytes and a curve of (seconds, bytes)."""

    device: torch.device
    peak: int = 0
    curve: list[tuple[float, int]] = field(default_factory=list)

    def __enter__(self) -> Watch:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._read = _reader(self.device)
        self._base, self._start = self._read(), time.perf_counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.look()
        self.curve.sort()  # whoever else looked did so beside the thread
        self.peak = max(used for _, used in self.curve)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._base

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.look()

    def look(self) -> None:
        self.curve.append((time.perf_counter() - self._start, self._read() - self._base))


def _reader(device: torch.device) -> Callable[[], int]:
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device)
    process = psutil.Process()
    return lambda: process.memory_info().rss


class _Storage(weakref.ref):
    """A storage that may have been freed, with its address and its bytes."""

    __slots__ = ("key", "size")
    key: int
    size: int


class AllocationTracker(TorchDispatchMode):
    """A `with` block that counts each new storage of every operator once, and takes it off again when it is freed.

    live, peak, largest: bytes, of the storages that the block made. Scratch memory inside one operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self._live = 0
        self._known: dict[int, _Storage] = {}
        self._freed: list[_Storage] = []

    @property
    def live(self) -> int:
        self._forget()
        return self._live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._watch((*args, *kwargs.values()), new=False)
        out = func(*args, **kwargs)
        self._watch((out,), new=True)
        return out

    def _watch(self, values: Sequence[Any], new: bool) -> None:
        """The tensors among an operator's arguments or results, which nest in nothing but lists and tuples."""
        self._forget()
        for value in values:
            if isinstance(value, torch.Tensor):
                self._count(value, new)
            elif isinstance(value, list | tuple):
                self._watch(value, new)

    def _count(self, leaf: torch.Tensor, new: bool) -> None:
        storage = leaf.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if new else 0
        # no Python of ours runs when it is freed: an interrupt that came within that would be swallowed
        self._known[key] = known = _Storage(storage, self._freed.append)
        known.key, known.size = key, size
        self._live += size
        self.peak = max(self.peak, self._live)
        self.largest = max(self.largest, size)

    def _forget(self) -> None:
        """Take off the storages that have been freed."""
        while self._freed:
            freed = self._freed.pop()
            del self._known[freed.key]
            self._live -= freed.size


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that the tensors of some work take at once, above what was there before it."""
    if device.type != "cuda":
        with AllocationTracker() as tracker:
            work()
        return tracker.peak
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def thin(curve: Sequence[tuple[float, int]], points: int = 200) -> list[tuple[float, int]]:
    """At most about `points` of a curve, each the highest of its stretch."""
    stretch = max(1, -(-len(curve) // points))
    return [max(curve[i : i + stretch], key=lambda point: point[1]) for i in range(0, len(curve), stretch)]


def free_bytes(device: torch.device) -> int:
    """What could still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
