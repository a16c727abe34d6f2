"""Where the time of each counted call goes on a GPU, kernel by kernel, beside what was predicted for it.

`bench/gpu.sh profile [--calls loss,values]` measures the calls of `bench.gpu.counts`, on operands of their real shapes.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.counts.calls import CALLS
from bench.gpu.measure import MOST_SECONDS, Apart, gpu_environment
from bench.gpu.timing import Bench, Record
from bench.harness import read_lines, write_line

PREDICTED = Path("bench/results/gpu_counts.jsonl")
REPEATS = 3  # of a call while its kernels are watched
KEPT, SHOWN = 16, 8  # kernels of a call that are recorded and printed, of those that take longest


class Profiled:
    """Calls in a process that may hang, crash or lose its device."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def profile(self, name: str) -> Record:
        """A call's record; raises where the process is of no more use."""
        record = self.measured(name)
        self.bench.release()
        return record

    def measured(self, name: str) -> Record:
        """A call's seconds by the device's clock, and those of each of its kernels."""
        try:
            step = CALLS[name].build()
            for _ in range(2):  # the first compiles
                step()
            calls = self.bench.calls_of(step)
            seconds = min(self.bench.seconds_of(step, calls) for _ in range(3))
            kernels = kernels_of(step, self.bench)
            busy = sum(kernel["seconds"] for kernel in kernels)
            return {"status": "ok", "seconds": seconds, "busy": busy, "kernels": kernels[:KEPT]}
        except Exception as error:  # reported as this call's result, beside the others'
            return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}


def kernels_of(step: Callable[[], Any], bench: Bench) -> list[Record]:
    """Launches of one step and their seconds by name, the longest first; shortest and longest are of one launch."""
    gpu = bench.device == "cuda"
    activity, kind = (ProfilerActivity.CUDA, DeviceType.CUDA) if gpu else (ProfilerActivity.CPU, DeviceType.CPU)
    with profile(activities=[activity], acc_events=True) as seen:
        for _ in range(REPEATS):
            step()
        bench.wait()
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == kind:  # a launch, which is the host's, has its kernel's seconds as well
            took = event.self_device_time_total if gpu else event.self_cpu_time_total
            found.setdefault(event.name, []).append(took / 1e6)
    rows = (
        {
            "name": name, "launches": len(x) / REPEATS, "seconds": sum(x) / REPEATS,
            "shortest": min(x), "longest": max(x),
        }
        for name, x in found.items()
    )  # fmt: skip
    return sorted(rows, key=lambda row: row["seconds"], reverse=True)


def profiles(out: Path, device: str, seconds: float, names: list[str]) -> int:
    """Each call into the result file; 1 where one failed."""
    bench = Bench(device, time.monotonic() + seconds)
    write_line(out, gpu_environment(device))
    predicted = {r["call"]: r["seconds"]["all"] for r in read_lines(PREDICTED) if r["kind"] == "gpu-count"}
    subject, failed = Apart(Profiled, bench), 0
    try:
        for name in names:
            left = bench.deadline - time.monotonic()
            none: Record = {"status": "not run", "reason": "no time left"}
            found = none if left <= 0 else subject.call("profile", name, timeout=min(MOST_SECONDS, left + 5))
            record = {"kind": "gpu-profile", "call": name, "predicted": predicted.get(name)} | found
            write_line(out, record)
            print("\n".join(described(record)), flush=True)
            failed += record["status"] != "ok"
    finally:
        subject.stop()
    return int(failed > 0)


def described(record: Record) -> Iterator[str]:
    """A call's line, and one for each of the kernels that take longest."""
    if record["status"] != "ok":
        yield f"{record['call']}: {record['status']}: {record['reason']}"
        return
    predicted = "" if record["predicted"] is None else f", predicted {1e3 * record['predicted']:.2f}"
    yield f"{record['call']}: {1e3 * record['seconds']:.2f} ms, kernels {1e3 * record['busy']:.2f}{predicted}"
    for kernel in record["kernels"][:SHOWN]:
        each = f"{1e6 * kernel['shortest']:.1f} to {1e6 * kernel['longest']:.1f} µs"
        yield f"  {1e3 * kernel['seconds']:8.3f} ms in {kernel['launches']:g}: {kernel['name'][:90]} ({each})"
