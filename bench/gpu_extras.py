"""What else a GPU is asked for: memory predicted against measured, training runs, the tables of widely copied reports.

Each is one of the project's own commands in a process of its own, or a table measured here; what cannot run is
recorded with its reason.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu import gpu_environment
from bench.harness import MB, write_line
from bench.logits_table import methods

Record = dict[str, Any]
MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "llama-3.2-1b", "qwen3-4b")
LENGTHS = (131_072, 98_304, 65_536, 32_768, 16_384)
LOGPS = (8, 912, 50_000)  # batch, length, vocabulary of the tutorial's table
MOST_SECONDS = 540


def cli(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "logitless.cli", *arguments]


def run(name: str, command: list[str]) -> Record:
    """A command's JSON, or why there is none."""
    begin = time.monotonic()
    about = {"kind": "gpu-extra", "name": name, "command": " ".join(command[1:])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return about | {"status": "failed", "reason": f"more than {MOST_SECONDS} s"}
    about["seconds"] = round(time.monotonic() - begin, 1)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return about | {"status": "failed", "reason": lines[-1][:300]}
    return about | {"status": "ok", "result": json.loads(done.stdout) if done.stdout.startswith("{") else None}


def profiles(tiny: bool, device: str) -> Iterator[Record]:
    """Peak memory of a step, predicted and measured, for four shapes; then the longest context of a 4B shape."""
    for model in ("tiny",) if tiny else MODELS:
        length = "64" if tiny else "4096"
        command = ("profile", "--model", model, "--context-length", length, "--real", device, "--json", "-")
        yield run(f"profile {model}", cli(*command))
    for length in (128,) if tiny else LENGTHS:
        model = "tiny" if tiny else "4b"
        options = ("--gradient-checkpointing", "--real", device, "--json", "-")
        found = run(f"stages {length}", cli("profile", "--model", model, "--context-length", str(length), *options))
        yield found
        if found["status"] == "ok":
            return


def log_probs(tiny: bool, device: str) -> Iterator[Record]:
    """The log-prob table of a widely copied tutorial: every method on bf16 logits of its shape, with its gradient."""
    batch, length, vocab = (2, 5, 301) if tiny else LOGPS
    logits = torch.randn(batch, length, vocab, device=device, dtype=torch.bfloat16)
    ids = torch.randint(vocab, (batch, length), device=device)
    for name, method in methods(batch).items():
        record: Record = {"kind": "gpu-extra", "name": f"logps {name}", "shape": [batch, length, vocab], "status": "ok"}
        for kind, grad in (("no_grad", False), ("grad", True)):
            z = logits.detach().requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                seconds, peak = _timed(lambda method=method, z=z: _step(method(z, ids), z), device)
            record |= {f"{kind}_seconds": seconds, f"{kind}_peak_mb": peak}
        yield record


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


def training(tiny: bool, device: str) -> Iterator[Record]:
    """`logitless train` in bf16, with whole logits and without."""
    model, length, steps = ("tiny", "64", "2") if tiny else ("qwen3-0.6b", "4096", "8")
    for loss in ("dense", "chunked"):
        options = ("--context-length", length, "--max-steps", steps, "--loss", loss, "--json", "-")
        where = ("--output-dir", f"build/gpu/{loss}-{time.time_ns()}", "--device", device, "--dtype", "bfloat16")
        yield run(f"train {loss}", cli("train", "--model", model, *options, *where))


def grade(tiny: bool, out: Path) -> Iterator[Record]:
    """Memory of soft tokens at a 4B model's width."""
    sizes = ("--hidden", "64", "--vocab", "301", "--steps", "2") if tiny else ("--hidden", "2560", "--vocab", "151936")
    file = str(out.with_name(f"{out.stem}-grade.jsonl"))
    yield run("grade memory", [sys.executable, "-m", "bench.grade", "--part", "memory", *sizes, "--out", file])


def extras(out: Path, tiny: bool, device: str) -> int:
    """All of it into the result file; 0, for a part that cannot run says why."""
    write_line(out, gpu_environment(device))
    for part in (
        log_probs(tiny, device), training(tiny, device), profiles(tiny, device), grade(tiny, out),
    ):  # fmt: skip
        for record in part:
            write_line(out, record)
            print(f"{record['name']}: {record['status']} {record.get('reason', '')}", flush=True)
    return 0
