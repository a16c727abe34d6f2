"""The same step run for real: predicted bytes beside allocated ones, and beside what the machine says."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import OptionError
from ...resident import Watch, free_bytes
from ...units import format_bytes
from .recording import Recording
from .step import Step, build, run, traced
from .trace import trace


@dataclass(frozen=True)
class Measured:
    """A predicted and a real recording, and the machine's own (bytes now, peak) at the end of each stage.

    `reserved` is what CUDA's allocator holds beyond its tensors at its peak, `context` what the driver holds beside it.
    """

    device: str
    predicted: Recording
    allocated: Recording
    readings: list[tuple[int, int]]
    reserved: int = 0
    context: int = 0

    def as_json(self) -> dict[str, Any]:
        """The comparison for machines."""
        rows = zip(self.predicted.stages, self.allocated.stages, self.readings, strict=True)
        return {
            "device": self.device,
            "stages": [
                {
                    "name": p.name,
                    "predicted_bytes": p.nbytes,
                    "predicted_peak_bytes": p.peak,
                    "allocated_bytes": c.nbytes,
                    "allocated_peak_bytes": c.peak,
                    "measured_bytes": now,
                    "measured_peak_bytes": most,
                }
                for p, c, (now, most) in rows
            ],
            "predicted_peak_bytes": self.predicted.peak.nbytes,
            "allocated_peak_bytes": self.allocated.peak.nbytes,
            "measured_peak_bytes": max(most for _, most in self.readings),
            "reserved_bytes": self.reserved,
            "context_bytes": self.context,
        }


def check_there(device: str | None) -> None:
    """OptionError for a device that is not there to run a step on; None: none is run."""
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--real cuda: this torch sees no CUDA device; use --real cpu, or leave it out")


def measure(step: Step, device: str) -> Measured:
    """Runs the step on "cpu" or "cuda". Raises OptionError where there is too little memory."""
    predicted = traced(step, "cpu" if device == "cpu" else "gpu")
    needed, free = predicted.peak.nbytes, free_bytes(torch.device(device))
    if needed > free:
        raise OptionError(
            f"--real {device}: the step needs {format_bytes(needed)}, {format_bytes(free)} are free; "
            "use a smaller model or --context-length"
        )
    torch.manual_seed(0)
    return _on_gpu(step, predicted) if device == "cuda" else _on_cpu(step, predicted)


def _on_cpu(step: Step, predicted: Recording) -> Measured:
    gc.collect()
    with Watch(torch.device("cpu")) as watch:
        model = build(step, "cpu")
        with trace(model, meter=_ResidentMeter(watch)) as t:
            run(step, model, t.device)
    return Measured("cpu", predicted, t.recording, t.readings)


def _on_gpu(step: Step, predicted: Recording) -> Measured:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(step, "cuda")
    with trace(model, meter=_AllocatorMeter()) as t:
        run(step, model, t.device)
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    most = max(peak for _, peak in t.readings)
    return Measured("cuda", predicted, t.recording, t.readings, max(0, held - most), total - free - held)


class _ResidentMeter:
    """This process's resident set above its start."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self._seen = watch, 0

    def read(self) -> tuple[int, int]:
        self.watch.look()
        part = [used for _, used in self.watch.curve[self._seen :]]
        self._seen += len(part)
        return part[-1], max(part)


class _AllocatorMeter:
    """What CUDA's caching allocator has given out."""

    def read(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated(), most
