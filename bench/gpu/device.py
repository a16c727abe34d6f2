"""What predictions take of a GPU, measured: `bench.gpu.counts.machine` puts these figures in the place of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import logitless as ll
from bench.gpu.rows import with_weights
from bench.gpu.timing import Bench, Record
from bench.harness import said
from logitless.vocab.devices import processors, tf32_products

DEPTH = 8192  # of products, so that their results take next to no time
LAUNCHES = 500
BUSY_SECONDS = 1.5  # of products that run while the clock is read


class Device:
    """A device's figures, each by a step that does little else, of the names that `Machine` gives them."""

    def __init__(self, bench: Bench, tiny: bool) -> None:
        self.bench, self.tiny, self.kind = bench, tiny, torch.device(bench.device)
        self.launch_seconds = 0.0

    def measure(self) -> Record:
        """What can be measured, and of the rest why not."""
        found: Record = {}
        failed: dict[str, str] = {}
        for name, measure in self.steps().items():
            try:
                found[name] = measure()
            except Exception as error:  # such as no tensor cores: the others are of use without it
                failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
            self.bench.release()
        return found | {"failed": failed}

    def steps(self) -> dict[str, Callable[[], Any]]:
        return {
            "name": lambda: torch.cuda.get_device_name(self.kind),
            "processors": lambda: torch.cuda.get_device_properties(self.kind).multi_processor_count,
            "gib": lambda: torch.cuda.get_device_properties(self.kind).total_memory / 2**30,
            "launch": self.launch, "wait": self.wait, "launch_in_graph": self.launch_in_graph,
            "bandwidth": self.bandwidth, "rate": partial(self.rate, torch.bfloat16),
            "rate_tf32": self.rate_tf32, "rate_fp32": partial(self.rate, torch.float32, waves=4),
            "clock": self.clock, "rate_own": self.rate_own,
        }  # fmt: skip

    def seconds(self, step: Callable[[], Any]) -> float:
        """Of one call among many."""
        step()
        return self.bench.seconds_of(step, self.bench.calls_of(step))

    def launch(self) -> float:
        """Seconds of an operator that does nothing to speak of, one of many in a row."""
        x = torch.zeros(1, device=self.kind)
        x.add_(1.0)
        self.launch_seconds = self.bench.seconds_of(lambda: x.add_(1.0), LAUNCHES)
        return self.launch_seconds

    def wait(self) -> float:
        """Seconds that one takes longer where the host asks for its number."""
        x = torch.zeros(1, device=self.kind)
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1.0).item()
        return max(0.0, (time.perf_counter() - begin) / LAUNCHES - self.launch_seconds)

    def launch_in_graph(self) -> float:
        """`launch` as a part of a CUDA graph."""
        x, graph = torch.zeros(1, device=self.kind), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                x.add_(1.0)
        return self.seconds(graph.replay) / LAUNCHES

    def bandwidth(self) -> float:
        """Bytes a second that a copy reads and writes."""
        x = torch.zeros(1 << (10 if self.tiny else 30), dtype=torch.uint8, device=self.kind)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self.seconds(lambda: y.copy_(x))

    def product(self, dtype: torch.dtype, waves: int) -> tuple[Callable[[], Any], int]:
        """A product of whole waves of tiles of 128 x 256, and its flop."""
        sizes = (16, 32, 64) if self.tiny else (128 * processors(self.kind), 256 * waves, DEPTH)
        rows, columns, depth = sizes
        a, b = (torch.randn(size, depth, dtype=dtype, device=self.kind) for size in (rows, columns))
        out = torch.empty(rows, columns, dtype=dtype, device=self.kind)
        return lambda: torch.mm(a, b.t(), out=out), 2 * rows * columns * depth

    def rate(self, dtype: torch.dtype, waves: int = 16) -> float:
        """Flop a second of the matrix library's products."""
        step, flop = self.product(dtype, waves)
        return flop / self.seconds(step)

    def rate_tf32(self) -> float:
        with tf32_products(True):
            return self.rate(torch.float32)

    def clock(self) -> float:
        """Hz of the processors while products run."""
        step, _ = self.product(torch.bfloat16, 16)
        for _ in range(max(1, round(BUSY_SECONDS / self.seconds(step)))):
            step()
        device = f"GPU-{torch.cuda.get_device_properties(self.kind).uuid}"
        mhz = said("nvidia-smi", "-i", device, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits")
        self.bench.wait()
        return 1e6 * float(mhz)

    def rate_own(self) -> float:
        """Flop a second of the library's kernel of products, what it does to their results included."""
        from logitless.vocab.backends.triton.weights import weighing  # which needs Triton, as nothing else here

        n, h, v = (16, 16, 256) if self.tiny else (4096, 4096, 32_768)
        hidden, weight = (torch.randn(size, h, dtype=torch.bfloat16, device=self.kind) for size in (n, v))
        hidden.requires_grad_()
        labels = torch.zeros(n, dtype=torch.int64, device=self.kind)
        timed = Timed(self.bench, weighing.weigh_products)
        with patch.object(weighing, "weigh_products", timed):
            for _ in range(4):
                with_weights(partial(ll.linear_cross_entropy, hidden, ll.LMHead(weight), labels, backend="triton"))()
        return 2 * n * h * v / min(timed.seconds)


class Timed:
    """The kernel of products, each first launch of which is timed."""

    def __init__(self, bench: Bench, kernel: Any) -> None:
        self.bench, self.kernel, self.seconds = bench, kernel, list[float]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            run = partial(self.kernel[grid], *args, **options)
            if options["AGAIN"]:
                run()
            else:
                self.seconds.append(self.bench.seconds_of(run, 1))

        return launch
