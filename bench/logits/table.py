"""The per-token log-prob table, for logits that exist: `python -m bench.logits.table [--shape 8,912,50000]`.

A widely copied tutorial compares a batched log-softmax with a loop over rows. This measures both as written
there, and every method of `per_token_logps`: peak memory above the inputs with and without gradient, what stays
alive between forward and backward, time, and error against float64. Each method has its own process; they take
turns.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import MB, THREADS, ResidentPeak, Worker, WorkerError, release_memory, resident_bytes, results
from logitless import per_token_logps

Record = dict[str, Any]
Shape = tuple[int, int, int]  # batch, length, vocabulary
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def batched(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def row_loop(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([batched(row, row_ids) for row, row_ids in zip(logits, ids, strict=True)])


def methods(batch: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """By name, the tutorial's two in the logits' own dtype, then ours."""
    table = {"tutorial batch": batched, "tutorial loop": row_loop}
    for name in ("dense", "loop", "recompute"):
        table[name] = lambda z, ids, name=name: per_token_logps(z, ids, method=name)
    for rows in sorted({1, 2, 4, batch}):
        table[f"chunked {rows}"] = lambda z, ids, rows=rows: per_token_logps(z, ids, method="chunked", chunk_size=rows)
    return table


class Subject:
    """One method in its own process, on logits that all processes map from one file."""

    def __init__(self, file: Path, shape: Shape, dtype: str, method: str) -> None:
        size = shape[0] * shape[1] * shape[2]
        logits = torch.from_file(str(file), shared=True, size=size, dtype=DTYPES[dtype])
        self.logits = logits.view(shape).requires_grad_()
        self.ids = make_ids(shape)
        self.method = methods(shape[0])[method]
        self.cotangent = torch.randn(shape[:2], generator=torch.Generator().manual_seed(2))

    def error(self) -> tuple[float, float]:
        """Error on the first sequence: the largest of a log-prob (nat), and the gradient's relative to its norm."""
        z = self.logits[:1].detach().requires_grad_()
        result = self.method(z, self.ids[:1])
        (grad,) = torch.autograd.grad(result, z, self.cotangent[:1].to(result.dtype))
        exact = z.detach().double().requires_grad_()
        truth = batched(exact, self.ids[:1])
        (slope,) = torch.autograd.grad(truth, exact, self.cotangent[:1].double())
        return (result - truth).detach().abs().max().item(), ((grad - slope).norm() / slope.norm()).item()

    def _forward(self) -> None:
        with torch.no_grad():
            self.method(self.logits, self.ids)

    def _step(self) -> None:
        result = self.method(self.logits, self.ids)
        torch.autograd.grad(result, self.logits, self.cotangent.to(result.dtype))

    def memory(self) -> tuple[float, float, float]:
        """MB above the inputs: peak of forward, kept for backward, peak of forward and backward."""
        peaks = []
        for run in (self._forward, self._step):
            release_memory()
            with ResidentPeak() as peak:
                run()
            peaks.append(peak.above_mb)
        release_memory()
        before = resident_bytes()
        result = self.method(self.logits, self.ids)
        release_memory()
        kept = (resident_bytes() - before) / MB
        del result
        return peaks[0], kept, peaks[1]

    def seconds(self) -> tuple[float, float]:
        """Seconds of forward without gradient, and of forward and backward."""
        times = []
        for run in (self._forward, self._step):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return times[0], times[1]


def make_ids(shape: Shape) -> Tensor:
    return torch.randint(shape[2], shape[:2], generator=torch.Generator().manual_seed(1))


def write_logits(file: Path, shape: Shape, dtype: str) -> None:
    """Random logits, a sequence at a time."""
    size = shape[0] * shape[1] * shape[2]
    whole = torch.from_file(str(file), shared=True, size=size, dtype=DTYPES[dtype]).view(shape)
    generator = torch.Generator().manual_seed(0)
    for row in whole:
        row.copy_(2 * torch.randn(shape[1:], generator=generator))


def measure(shape: Shape, dtype: str, rounds: int, folder: Path) -> list[Record]:
    """Error and memory of every method, then the rounds of timings in an order that changes."""
    file = folder / f"logits.{dtype}"
    write_logits(file, shape, dtype)
    workers = {name: Worker(Subject, file, shape, dtype, name) for name in methods(shape[0])}
    records = {name: measure_one(worker, name, dtype) for name, worker in workers.items()}
    running = [name for name, record in records.items() if record["status"] == "ok"]
    for number in range(rounds):
        for name in random.Random(number).sample(running, len(running)):
            forward, step = workers[name].call("seconds")
            records[name]["forward_s"].append(forward)
            records[name]["step_s"].append(step)
    for name in running:
        workers[name].stop()
        for key in ("forward_s", "step_s"):
            records[name][f"{key}_median"] = statistics.median(records[name][key])
    file.unlink()
    return list(records.values())


def measure_one(worker: Worker, name: str, dtype: str) -> Record:
    record: Record = {"kind": "logits", "method": name, "dtype": dtype, "status": "ok"}
    try:
        record["value_error"], record["grad_error"] = worker.call("error")
        worker.call("seconds")  # the warm-up
        peaks = worker.call("memory")
        record |= dict(zip(("forward_peak_mb", "kept_mb", "step_peak_mb"), peaks, strict=True))
    except WorkerError as error:
        return record | {"status": "failed", "reason": str(error)}
    return record | {"forward_s": [], "step_s": []}


def table(records: list[Record], shape: Shape) -> str:
    """Markdown, with the bytes of one copy of the logits beside it."""
    lines = [
        "| dtype | method | forward MB | kept MB | with backward MB | forward s | both s | error (nat) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = ("forward_peak_mb", "kept_mb", "step_peak_mb")
    for r in records:
        if r["status"] != "ok":
            lines.append(f"| {r['dtype']} | {r['method']} | {r['reason']} |")
            continue
        cells = [r["dtype"], r["method"], *(f"{r[key]:.0f}" for key in keys)]
        cells += [f"{r[key]:.2f}" for key in ("forward_s_median", "step_s_median")]
        lines.append(f"| {' | '.join(cells)} | {r['value_error']:.0e} |")
    batch, length, vocab = shape
    sizes = ", ".join(f"{batch * length * vocab * d.itemsize / MB:.0f} MB in {n}" for n, d in DTYPES.items())
    return "\n".join([*lines, f"\nB={batch}, L={length}, V={vocab}; the logits themselves: {sizes}."])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="memory and time of per-token log-probs from existing logits")
    parser.add_argument("--shape", default="8,912,50000", help="batch,length,vocabulary")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    options = parser.parse_args(argv)
    batch, length, vocab = (int(size) for size in options.shape.split(","))
    shape = (batch, length, vocab)
    write = results(options.out, THREADS, shape=shape, rounds=options.rounds)
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes.split(","):
            for record in measure(shape, dtype, options.rounds, Path(folder)):
                write(record)
                records.append(record)
    print(table(records, shape))
    return 1 if any(record["status"] != "ok" for record in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
