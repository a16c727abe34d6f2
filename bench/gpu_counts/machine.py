"""The device that times are predicted for, and what a product, a kernel or an operator takes on it.

Constants are stated here and stand in every result; once a GPU was there, `with_measured` puts the rate of its bare
products in the place of the one below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu_counts.kernels import Counted, Launch
from bench.gpu_counts.recording import Event, Operator, Product, Wait
from bench.harness import read_lines

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.85), (64, 256, 0.75), (64, 128, 0.65), (64, 64, 0.45))

MOVED = 0.2  # of the rows that `rescale` looks at: a k-th slice has a new maximum for one in k, and there are some 16


@dataclass(frozen=True)
class Machine:
    """An H200 as others have measured it: not measured here."""

    name: str = "NVIDIA H200"
    processors: int = 132
    clock: float = 1.7e9  # Hz, while tensor cores are busy
    rate: float = 739e12  # flop a second of bf16 products in whole waves
    rate_own: float = 630e12  # of bf16 products in a kernel of Triton's: assumed, 85 % of the library's
    rate_tf32: float = 370e12  # of fp32 products in TF32
    rate_fp32: float = 50e12  # of fp32 products, without TF32
    bandwidth: float = 4.3e12  # bytes a second of memory
    shown: float = 0.4  # of a product's result, read and written: what the multiplying does not hide
    issued: float = 0.8  # of the instructions that a processor could issue
    launch: float = 2.5e-6  # seconds, at least, of whatever is launched
    launch_in_graph: float = 1.3e-6  # of the same as a part of a CUDA graph
    ends: float = 1.2e-6  # of a program that fills a processor's shared memory, begins, and ends at once: assumed
    wait: float = 25e-6  # seconds that the device idles after the host has waited

    def tiling(self, p: Product) -> tuple[int, int, float]:
        """(tiles, waves, seconds) of a product in the tiles that suit it best."""
        best = (0, 0, math.inf)
        for rows, columns, share in TILES:
            tiles = -(-p.rows // rows) * -(-p.columns // columns)
            waves = -(-tiles // self.processors)
            rate = self.rate if p.operand == 2 else self.rate_tf32 if p.tf32 else self.rate_fp32
            seconds = waves * self.processors * 2 * rows * columns * p.depth / (rate * share)
            best = min(best, (tiles, waves, seconds), key=lambda found: found[2])
        return best

    def product(self, p: Product) -> float:
        """Seconds of a product."""
        result = p.rows * p.columns * p.result * (1 + p.adds)
        multiplying = self.tiling(p)[2] + self.shown * result / self.bandwidth
        return max(self.launch, multiplying, p.nbytes / self.bandwidth)

    def kernel(self, launch: Launch, counted: Counted | None) -> float:
        """Seconds of a kernel: memory, or the instructions of its hot loop, whichever takes longer."""
        if launch.name == "weigh_products":
            return self.weighing(launch)
        entries, nbytes = traffic(launch)
        seconds = nbytes / self.bandwidth
        if counted is not None and counted.loop is not None and entries:
            each, loop = entries / 32 / counted.entries, counted.loop  # passes of a warp through the loop
            cycles = max(loop.always / (4 * self.issued), loop.half_rate / 2, 2 * loop.functions)
            slots = self.processors * counted.per_processor
            full = -(-launch.programs // slots) / (launch.programs / slots)
            seconds = max(seconds, each * cycles * full / (self.processors * self.clock))
        return max(self.launch, seconds)

    def weighing(self, launch: Launch) -> float:
        """Seconds of a product that writes weights in the place of its result; the second launch's programs end."""
        a = launch.arguments
        if a["AGAIN"]:
            return self.launch + self.ends * launch.programs / self.processors
        numbers = a["n"] * a["width"]
        return 2 * numbers * a["depth"] / self.rate_own + self.shown * 2 * numbers / self.bandwidth

    def in_graph(self) -> Machine:
        """The same for what a CUDA graph launches."""
        return replace(self, launch=self.launch_in_graph)

    def seconds(self, event: Event, counted: dict[str, Counted]) -> float:
        """Seconds of any event."""
        if isinstance(event, Wait):
            return self.wait
        if isinstance(event, Product):
            return self.product(event)
        if isinstance(event, Operator):
            return max(self.launch, event.nbytes / self.bandwidth)
        return self.kernel(event, counted.get(event.key))


def traffic(launch: Launch) -> tuple[int, int]:
    """(entries, bytes) that a kernel goes over; (0, 0) for those of a few numbers, which cost their launch."""
    a = launch.arguments

    def size(name: str) -> int:
        return a[name].dtype.itemsize

    if launch.name == "accumulate_plain_slice":
        rows = launch.grid[0] * a["ROWS"]
        return rows * a["width"], rows * a["width"] * size("raw")
    if launch.name == "weigh_plain_slice":
        rows = launch.grid[0] * a["ROWS"]
        return rows * a["width"], rows * a["width"] * (size("raw") + size("weights"))
    if launch.name == "rescale":
        numbers = int(MOVED * launch.grid[0] * a["width"])
        return numbers, 2 * numbers * size("x") * (1 + a["GAINS"])
    if launch.name == "accumulate_slice":
        rows = launch.grid[0] * a["ROWS"]
        each = size("raw") * (1 + a["REF"]) * (1 + a["WRITE_BACK"])
        each += sum(size(f"out{k}") for k in (0, 1) if a[f"BASIS{k}"])
        return rows * a["width"], rows * a["width"] * each
    if launch.name == "logits_grad_slice":
        rows = launch.grid[0] * a["ROWS"]
        return rows * a["width"], rows * a["width"] * (size("raw") * (1 + a["REF"]) + size("out"))
    if launch.name == "look_again":
        rows = launch.grid[0] * a["ROWS"]
        return rows * a["width"], rows * a["width"] * 2 * size("raw")
    if launch.name == "look_for_tokens":
        return launch.grid[0] * a["width"], launch.grid[0] * a["width"] * size("raw")
    if launch.name == "scaled":
        return a["count"], a["count"] * (size("x") + size("out"))
    if launch.name in ("scatter", "add_weighted", "dot"):
        numbers = launch.grid[0] * a["width"]
        return numbers, numbers * (2 * size("into" if "into" in a else "x") + size("x" if "x" in a else "table"))
    return 0, 0


def shared_bytes(p: Product, machine: Machine) -> int:
    """Bytes that a product's tiles read through the second-level cache."""
    tiles = machine.tiling(p)[0]
    area = p.rows * p.columns / max(1, tiles)
    return int(tiles * 2 * math.sqrt(area) * p.depth * p.operand)


def with_measured(machine: Machine, file: Path) -> Machine:
    """The machine with the rate at which a result file's bare products ran, where there is one."""
    if not file.is_file():
        return machine
    lines: list[dict[str, Any]] = read_lines(file)
    bare = [r for r in lines if r.get("method") == "bare GEMMs" and r["case"] == "loss" and r["status"] == "ok"]
    if not bare:
        return machine
    n, h, v = bare[0]["shape"]
    seconds = bare[0]["median_s"] - machine.shown * 4 * (3 * v * h + n * v) / machine.bandwidth
    return replace(machine, name=lines[0].get("gpu", machine.name), rate=6 * n * h * v / seconds)
