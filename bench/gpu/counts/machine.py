"""The device that times are predicted for, and what a product, a kernel or an operator takes on it.

Constants are stated here and stand in every result; once a GPU was there, `with_measured` puts what it measured in the
place of those below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.gpu.counts.kernels import Counted, Launch
from bench.gpu.counts.recording import Event, Operator, Product, Wait
from bench.harness import read_lines

# What programs of some kernels do one after another: (turns of each loop, reads of memory in one, reads outside;
# those of what the program has just written count half). The selection's loops that look for a limit take 3 turns and
# none, those that store what is taken 4 and 2: means over rows of normal logits.
CHAINS: dict[str, Callable[[dict[str, Any]], tuple[float, int, int]]] = {
    "look_for_tokens": lambda a: (a["part_width"] / a["BLOCK"], 1, 1),
    "count_above": lambda a: (a["part_width"] / a["BLOCK"], 1, 2),
    "draw_tokens": lambda _: (0, 0, 3),
    "best_of_groups": lambda _: (9 / 4, 0, 4),
}
COUNTED_ROWS = 0.91  # whose token is not among the best 64: of normal logits with the benchmark's deviation of 2
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.85), (64, 256, 0.75), (64, 128, 0.65), (64, 64, 0.45))

MOVED = 0.2  # of the rows that `rescale` looks at: a k-th slice has a new maximum for one in k, and there are some 16


@dataclass(frozen=True)
class Machine:
    """An H200 as others have measured it: not measured here."""

    name: str = "NVIDIA H200"
    processors: int = 132
    gib: float = 141  # of memory
    clock: float = 1.7e9  # Hz, while tensor cores are busy
    rate: float = 739e12  # flop a second of bf16 products in whole waves
    rate_own: float = 630e12  # of bf16 products in a kernel of Triton's: assumed, 85 % of the library's
    rate_tf32: float = 370e12  # of fp32 products in TF32
    rate_fp32: float = 50e12  # of fp32 products, without TF32
    bandwidth: float = 4.3e12  # bytes a second of memory
    shown: float = 0.4  # of a product's result, read and written: what the multiplying does not hide
    issued: float = 0.8  # of the instructions that a processor could issue
    barrier: float = 100.0  # cycles of a barrier, with the shuffles and shared memory beside it: assumed
    read: float = 600.0  # cycles that a warp waits for memory: assumed
    launch: float = 2.5e-6  # seconds, at least, of whatever is launched
    launch_in_graph: float = 1.3e-6  # of the same as a part of a CUDA graph
    ends: float = 1.2e-6  # of a program that fills a processor's shared memory, begins, and ends at once: assumed
    wait: float = 25e-6  # seconds that the device idles after the host has waited
    measured: tuple[str, ...] = ()  # names of those that a GPU has given

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
        if counted is not None and launch.name in CHAINS:
            seconds = self.chained(launch, counted, seconds)
        return max(self.launch, seconds)

    def chained(self, launch: Launch, counted: Counted, seconds: float) -> float:
        """Seconds of a kernel whose loops take `seconds`, with what its programs do one after another."""
        turns, reads_a_turn, reads_once = CHAINS[launch.name](launch.arguments)
        held = min(counted.per_processor, -(-launch.programs // self.processors))  # programs side by side
        waves = -(-launch.programs // (self.processors * held))
        issue, way = max(1, counted.warps / 4) / self.issued, counted.way
        turn = way.turn * issue + way.barriers_a_turn * self.barrier + reads_a_turn * self.read
        once = way.once * max(1, held * counted.warps / 4) / self.issued
        once += way.barriers_once * self.barrier + reads_once * self.read
        return max(seconds, waves * turns * turn / self.clock) + waves * once / self.clock

    def weighing(self, launch: Launch) -> float:
        """Seconds of a product that writes weights, or sums, but no logits; a second launch's programs end."""
        product = own_product(launch)
        if product is None:
            return self.launch + self.ends * launch.programs / self.processors
        written = product.rows * product.columns * product.result
        return product.flop / self.rate_own + self.shown * written / self.bandwidth

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


def own_product(launch: Launch) -> Product | None:
    """What the kernel of the products multiplies; None of others, and of its second launch, whose programs end."""
    a = launch.arguments
    if launch.name != "weigh_products" or a["AGAIN"]:
        return None
    return Product(a["n"], a["width"], a["depth"], operand=2, result=2 * a["WEIGHS"])


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
    if (product := own_product(launch)) is not None:
        return product.rows * product.columns, product.nbytes
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
    if launch.name == "count_above":
        return launch.grid[0] * a["width"], int(COUNTED_ROWS * launch.grid[0] * a["width"] * size("raw"))
    if launch.name == "best_of_groups":
        looked_at = 2 * a["LANES"] * a["GROUP"]
        return launch.grid[0] * a["GROUPS"], launch.grid[0] * (a["n_groups"] * size("peaks") + looked_at * size("raw"))
    if launch.name == "scaled":
        return a["count"], a["count"] * (size("x") + size("out"))
    numbers = launch.grid[0] * a.get("width", 0)
    if launch.name == "dot":  # a token's row, which a cache holds for all of its entries, and each entry's
        return numbers, numbers * size("table") + a["x"].numbers * size("x")
    if launch.name == "scatter":  # a row for each place, and those that it is added to once
        return numbers, numbers * size("x") + 2 * min(numbers, a["into"].numbers) * size("into")
    if launch.name == "add_weighted":
        return numbers * a["k"], numbers * (2 * size("into") + a["k"] * size("table"))
    return 0, 0


def shared_bytes(event: Event, machine: Machine) -> int:
    """Bytes that the tiles of a product, the library's or our own, read through the second-level cache."""
    if isinstance(event, Product):
        tiles = machine.tiling(event)[0]
        area = event.rows * event.columns / max(1, tiles)
        return int(tiles * 2 * math.sqrt(area) * event.depth * event.operand)
    if not isinstance(event, Launch) or (product := own_product(event)) is None:
        return 0
    rows, columns = event.arguments["ROWS"], event.arguments["BLOCK"]
    tiles = -(-product.rows // rows) * -(-product.columns // columns)
    return tiles * (rows + columns) * product.depth * product.operand


def with_measured(machine: Machine, file: Path) -> Machine:
    """The machine with each constant that a result file of `bench/gpu.sh` has measured, where there is one."""
    lines: list[dict[str, Any]] = read_lines(file) if file.is_file() else []
    found = next((r for r in lines if r["kind"] == "gpu-device" and r["device"] == "cuda"), {})
    own = {name: found[name] for name in (f.name for f in fields(Machine)) if name in found}
    return replace(machine, **own, measured=tuple(own))
