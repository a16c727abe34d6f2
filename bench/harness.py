"""Measuring: a process for each method, its resident set, the machine it ran on.

With BENCH_ONEDNN=1 in the environment, everybody's fp32 products are oneDNN's, by torch's own switch: see
docs/how-to/cpu.md.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch

from logitless.versions import version_of

SCHEMA = 1
THREADS = 2
START = "spawn"  # of a worker: a new interpreter, which holds nothing that another process had
MB = 1e6
M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD = -1, 128 * 1024  # of glibc's malloc.h and its manual
M_MMAP_MAX, DEFAULT_MMAP_MAX = -4, 65_536
PACKAGES = (
    "torch", "transformers", "trl", "cut-cross-entropy", "liger-kernel", "quack-kernels", "triton", "numpy", "jax",
    "gguf", "lm-eval",
)  # fmt: skip
Record = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)


if os.environ.get("BENCH_ONEDNN"):  # which workers inherit
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


class WorkerError(RuntimeError):
    """A worker raised, died, took too long or too much memory; the message is one line."""


def _read(path: str) -> str | None:
    return Path(path).read_text().strip() if Path(path).exists() else None


def said(*command: str) -> str:
    """What a program prints; nothing where it is not installed, or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def processor() -> str:
    """The processor, with its family and model where it has them: virtual machines name all of a maker's alike."""
    lines = (_read("/proc/cpuinfo") or "").split("\n\n", 1)[0].splitlines()
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = known.get("model name") or platform.processor()
    return f"{name} (family {known['cpu family']}, model {known['model']})" if "cpu family" in known else name


def commit() -> str | None:
    """The commit, with -dirty where src/ or bench/ is not as in it, a script that is not in it yet included."""
    head = said("git", "rev-parse", "--short", "HEAD")
    changed = said("git", "status", "--porcelain", "--", ":/src", ":/bench", ":(top,exclude)bench/results")
    return f"{head}-dirty" if head and changed else head or None


def preloaded_allocator() -> str | None:
    """The allocator's library that this process was started with, without its folder."""
    libraries = [Path(x).name for x in os.environ.get("LD_PRELOAD", "").split(":")]
    return next((x for x in libraries if "malloc" in x), None)


def environment(threads: int | None = None) -> Record:
    """The machine and versions that every published number stands beside; threads: of others than this process."""
    return {
        "kind": "environment",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": processor(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "commit": commit(),
        "allocator": preloaded_allocator(),
        "versions": {name: version_of(name) for name in PACKAGES},
    }


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def machine_busy_seconds() -> float:
    """Processor seconds of every process since the machine started, time stolen by its host included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, (_read("/proc/stat") or "").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def timed(run: Callable[[], Any], calls: int = 1) -> tuple[float, float]:
    """Wall seconds of one call, and the part of the machine that others kept busy meanwhile."""
    wall, own, all_ = time.perf_counter(), time.process_time(), machine_busy_seconds()
    for _ in range(calls):
        run()
    wall, own, all_ = time.perf_counter() - wall, time.process_time() - own, machine_busy_seconds() - all_
    return wall / calls, max(0.0, all_ - own) / (wall * (os.cpu_count() or 1))


class Turn(NamedTuple):
    """One call: wall seconds, this process's CPU seconds, and the part of the machine that others kept busy."""

    wall: float
    cpu: float
    others: float


def in_turns(steps: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[Turn]]:
    """Every step once a round, so that a busy minute meets all of them; a first round, which warms up, is left out."""
    found: dict[Key, list[Turn]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            own = time.process_time()
            wall, others = timed(step)
            if number:
                found[name].append(Turn(wall, time.process_time() - own, others))
    return found


def least(turns: Iterable[Turn], clock: str = "cpu") -> float:
    """Seconds of the fastest call, by this process's clock or by the one on the wall."""
    return min(getattr(turn, clock) for turn in turns)


def busiest(found: Mapping[Any, list[Turn]]) -> float:
    """The largest part of the machine that others kept busy during a call."""
    return max(turn.others for turns in found.values() for turn in turns)


def release_memory() -> None:
    """Hand freed heap back to the system, so that a baseline holds nothing of the run before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """glibc keeps what is freed meanwhile, so that a timed call is not one of the kernel clearing memory for it.

    By default a tensor of more than 32 MB is new memory at each call, which the kernel clears page by page. Kept memory
    is used again in most calls and not in all: an aligned tensor may not fit into the hole that its like has left.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_MAX, DEFAULT_MMAP_MAX)
        libc.mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD)
        release_memory()


@contextmanager
def preloaded(library: Path | None) -> Iterator[None]:
    """Processes that start meanwhile have this library's allocator; jemalloc is told to keep whatever is freed."""
    settings = {"LD_PRELOAD": str(library), "MALLOC_CONF": "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1"}
    with patch.dict(os.environ, settings if library else {}):
        yield


class ResidentPeak:
    """Samples this process's resident set every two milliseconds while the block runs."""

    def __enter__(self) -> "ResidentPeak":
        self.baseline = self.peak = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, resident_bytes())

    @property
    def above_mb(self) -> float:
        return (self.peak - self.baseline) / MB


class Worker:
    """A fresh process that builds a subject and calls its methods by name, one at a time."""

    def __init__(self, build: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context(START)
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, build, args), daemon=True)
        self._process.start()
        child.close()

    def call(self, method: str, *args: Any, timeout: float = 1800, watch: Callable[[], None] = lambda: None) -> Any:
        """`watch` runs four times a second and may raise WorkerError, which ends this worker."""
        try:
            self._connection.send((method, args))
            deadline = time.monotonic() + timeout
            while not self._connection.poll(0.25):
                watch()
                if time.monotonic() > deadline:
                    raise WorkerError(f"no answer within {timeout:g} s")
            failed, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self.stop(patience=0)
            raise WorkerError(f"the process died (exit code {self._process.exitcode})") from error
        except WorkerError:
            self.stop(patience=0)
            raise
        if failed:
            raise WorkerError(value)
        return value

    def resident_bytes(self) -> int:
        return resident_bytes(self._process.pid or "self") if self._process.is_alive() else 0

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, patience: float = 10.0) -> None:
        self._connection.close()  # which an idle worker takes as its end
        self._process.join(patience)
        self._process.kill()
        self._process.join()


def _serve(connection: Any, build: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(THREADS)
    subject = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            os._exit(0)  # nothing is left to save, and taking down an interpreter with torch takes a second
        try:
            subject = subject if subject is not None else build(*args)
            reply = (False, getattr(subject, method)(*arguments))
        except Exception as error:  # reported as this method's result, beside the others'
            lines = str(error).strip().splitlines()
            reply = (True, f"{type(error).__name__}: {lines[0] if lines else ''}".replace(os.getcwd(), "."))
        connection.send(reply)


def results(out: Path | None, threads: int | None = None, **about: Any) -> Callable[[Record], None]:
    """What adds a row to a new result file, the machine's line before the first; without a file rows go nowhere.

    To be called before anything is measured: a file that exists is refused, and the machine's load is that of a start.
    A run that fails before its first row leaves no file; two at once need two names.
    """
    if out is None:
        return lambda row: None
    if out.exists():
        print(f"error: --out: expected a new file, got {out}, which exists; name another or remove it", file=sys.stderr)
        raise SystemExit(2)
    begun = [environment(threads) | about]

    def write(row: Record) -> None:
        while begun:
            write_line(out, begun.pop())
        write_line(out, row)

    return write


def write_line(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"schema": SCHEMA} | record) + "\n")


def read_lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]
