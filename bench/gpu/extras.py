"""What else a GPU is asked for: memory predicted against measured, training runs, the tables of widely copied reports.

Each is one of the project's own commands, or a table, in a process of its own; what cannot run is recorded with its
reason.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.measure import Apart, gpu_environment
from bench.gpu.timing import Record
from bench.harness import MB, read_lines, write_line
from bench.logits.table import methods

MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "llama-3.2-1b", "qwen3-4b")
LENGTHS = (131_072, 98_304, 65_536, 32_768, 16_384)
LOGPS = (8, 912, 50_000)  # batch, length, vocabulary of the tutorial's table
LEAST_SECONDS = 15  # that a command is given


class Clock:
    """The seconds that are left."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


def cli(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "logitless.cli", *arguments]


def run(clock: Clock, name: str, command: list[str]) -> Record:
    """A command's JSON, or why there is none."""
    begin, left = time.monotonic(), clock.left
    about = {"kind": "gpu-extra", "name": name, "command": " ".join(command[1:])}
    if left < LEAST_SECONDS:
        return about | {"status": "failed", "reason": "no time left"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired:
        return about | {"status": "failed", "reason": f"not done in the {left:.0f} s that were left"}
    about["seconds"] = round(time.monotonic() - begin, 1)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return about | {"status": "failed", "reason": lines[-1][:300]}
    return about | {"status": "ok", "result": json.loads(done.stdout) if done.stdout.startswith("{") else None}


def profiles(clock: Clock, tiny: bool, device: str) -> Iterator[Record]:
    """Peak memory of a step, predicted and measured, for four shapes."""
    for model in ("tiny",) if tiny else MODELS:
        length = "64" if tiny else "4096"
        command = ("profile", "--model", model, "--context-length", length, "--real", device, "--json", "-")
        yield run(clock, f"profile {model}", cli(*command))


def stages(clock: Clock, tiny: bool, device: str) -> Iterator[Record]:
    """The stages of a 4B shape's step at the longest context that fits."""
    for length in (128,) if tiny else LENGTHS:
        model = "tiny" if tiny else "4b"
        options = ("--gradient-checkpointing", "--real", device, "--json", "-")
        found = run(
            clock, f"stages {length}", cli("profile", "--model", model, "--context-length", str(length), *options)
        )
        yield found
        if found["status"] == "ok":
            return


def logps(clock: Clock, tiny: bool, device: str) -> Iterator[Record]:
    """The log-prob table of a widely copied tutorial: every method on bf16 logits of its shape, with its gradient."""
    shape = (2, 5, 301) if tiny else LOGPS
    subject = Apart(Logps, shape, device, torch.get_num_threads(), methods)
    try:
        for name in methods(shape[0]):
            about: Record = {"kind": "gpu-extra", "name": f"logps {name}", "shape": list(shape)}
            if clock.left < LEAST_SECONDS:
                yield about | {"status": "failed", "reason": "no time left"}
            else:
                yield about | subject.call("measure", name, timeout=clock.left)
    finally:
        subject.stop()


class Logps:
    """The table's logits, in a process that gives their memory back to those that follow."""

    def __init__(self, shape: tuple[int, int, int], device: str, threads: int, methods: Callable[..., Any]) -> None:
        torch.set_num_threads(threads)
        self.device, self.methods = device, methods(shape[0])
        self.logits = torch.randn(*shape, device=device, dtype=torch.bfloat16)
        self.ids = torch.randint(shape[2], shape[:2], device=device)

    def measure(self, name: str) -> Record:
        """Seconds and peak MB of one method, without gradient and with it."""
        method, record = self.methods[name], {"status": "ok"}
        for kind, grad in (("no_grad", False), ("grad", True)):
            z = self.logits.detach().requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                seconds, peak = _timed(lambda z=z: _step(method(z, self.ids), z), self.device)
            record |= {f"{kind}_seconds": seconds, f"{kind}_peak_mb": peak}
        return record


def _step(logps: torch.Tensor, logits: torch.Tensor) -> None:
    if logits.requires_grad:
        torch.autograd.grad(logps.sum(), logits)


def _timed(step: Any, device: str) -> tuple[float, float]:
    """(seconds of the third call, peak MB above what was there)."""
    gpu = device == "cuda"
    for _ in range(2):
        step()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else 0
    begin = time.perf_counter()
    step()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin, (torch.cuda.max_memory_allocated() - before) / MB if gpu else 0.0


def training(clock: Clock, tiny: bool, device: str) -> Iterator[Record]:
    """`logitless train` with whole logits and without, in bf16 on a GPU."""
    model, length, batch, steps = ("tiny", "64", "1", "2") if tiny else ("qwen3-0.6b", "4096", "4", "8")
    dtype = "bfloat16" if device == "cuda" else "float32"  # emulated on most CPUs, and slow
    for loss in ("dense", "logitless"):
        options = ("--batch-size", batch, "--max-steps", steps, "--loss", loss, "--json", "-")
        where = ("--output-dir", f"build/gpu/{loss}-{time.time_ns()}", "--device", device, "--dtype", dtype)
        yield run(clock, f"train {loss}", cli("train", "--model", model, "--context-length", length, *options, *where))


def grade(clock: Clock, tiny: bool, device: str) -> Iterator[Record]:
    """Memory of soft tokens at a 4B model's width."""
    sizes = ("--hidden", "64", "--vocab", "301", "--steps", "2") if tiny else ("--hidden", "2560", "--vocab", "151936")
    sizes += ("--device", device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "grade.jsonl"
        command = [sys.executable, "-m", "bench.grade.run", "--part", "memory", *sizes, "--out", str(file)]
        record = run(clock, "grade memory", command)
        yield record | ({"result": read_lines(file)} if file.exists() else {})


PARTS = {"logps": logps, "training": training, "profiles": profiles, "stages": stages, "grade": grade}


def extras(out: Path, tiny: bool, device: str, seconds: float, parts: list[str]) -> int:
    """The parts into the result file; 0, for one that cannot run says why."""
    clock = Clock(seconds)
    write_line(out, gpu_environment(device))
    for name in parts:
        for record in _records(name, PARTS[name](clock, tiny, device)):
            write_line(out, record)
            print(f"{record['name']}: {record['status']} {record.get('reason', '')}", flush=True)
    return 0


def _records(name: str, found: Iterator[Record]) -> Iterator[Record]:
    """What a part finds, its error last if it has one: the other parts follow."""
    try:
        yield from found
    except Exception as error:  # reported as this part's result
        reason = f"{type(error).__name__}: {error}"[:200]
        yield {"kind": "gpu-extra", "name": name, "status": "failed", "reason": reason}
