"""Memory and time of single calls, on a GPU by its own clock."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import MB

LEAST_SECONDS = 0.2  # a timing repeats its call until it takes about this long
Record = dict[str, Any]


class Bench:
    """Memory and time of single calls on one device."""

    def __init__(self, device: str, deadline: float) -> None:
        self.device, self.deadline = device, deadline

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def release(self) -> None:
        """Gives freed memory back; raises where an earlier kernel has broken the device for this process."""
        gc.collect()
        self.wait()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def peak_mb(self, step: Callable[[], Any]) -> float:
        """Peak memory of a call above what was there, its gradients included."""
        if self.device != "cuda":
            step()
            return 0.0
        self.release()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / MB

    def seconds_of(self, step: Callable[[], Any], calls: int) -> float:
        """Seconds of one call, by the device's own clock where it has one."""
        if self.device != "cuda":
            begin = time.perf_counter()
            for _ in range(calls):
                step()
            return (time.perf_counter() - begin) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            step()
        end.record()
        self.wait()
        return begin.elapsed_time(end) / 1e3 / calls

    def calls_of(self, step: Callable[[], Any]) -> int:
        """How often a timing calls it; it is warm by now."""
        return max(1, min(50, round(LEAST_SECONDS / max(1e-6, self.seconds_of(step, 1)))))
