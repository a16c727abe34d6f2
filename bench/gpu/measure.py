"""How the GPU benchmark measures: one method at a time, in a process that may hang, crash or lose its device."""

import faulthandler
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.cases import Tensors
from bench.gpu.device import Device
from bench.gpu.rows import ROWS, Absent, Row, errors_of, make_operands, oracle
from bench.gpu.timing import Bench, Record
from bench.harness import Worker, WorkerError, environment, said
from bench.peers import Method, Step
from logitless.errors import BackendError

GRACE = 55.0  # seconds for what has begun
MOST_SECONDS = 100.0  # of one method on one row; it is ended then
FLOOR_ROUNDS = 3  # in which floors take turns, since a GPU that has been busy is slower
GROSS = 0.1  # an error of ours that no rounding makes: in nats, or of a gradient's largest entry
# nats that fp32 sums of bf16 products, and means of these, may be off by: twice what an H200's were
LARGEST = dict.fromkeys(("logprob", "loss", "lse"), 5e-5)
NOT_HERE = (Absent, ModuleNotFoundError, BackendError)  # not installed, or not for this device: nothing went wrong


def wrong(kind: str, expected: Tensors, errors: dict[str, float]) -> str:
    """What a method got wrong, if anything: ours beyond rounding, a peer by as much as the largest entry or by NaN."""
    for name, error in errors.items():
        largest = 1.0 if name.startswith("grad") else float(expected[name].abs().max())
        if not error < (LARGEST.get(name, GROSS) if kind == "ours" else largest):
            return f"{name} is off by {error:.1e}"
    return ""


class Subject:
    """A row's operands, its results in float64 and its floors, with the fastest of which each method takes turns.

    `methods(row, backend)` yields who can be measured. Kept from call to call while the row is the same.
    """

    def __init__(
        self, bench: Bench, rounds: int, backend: str | None, tiny: bool, threads: int,
        methods: Callable[[Row, str | None], Iterator[Method]],
    ) -> None:  # fmt: skip
        torch.set_num_threads(threads)
        left = bench.deadline + GRACE - time.monotonic()
        faulthandler.dump_traceback_later(max(1.0, left), exit=True)  # whoever began this process may be gone by then
        self.bench, self.rounds, self.backend, self.tiny, self.methods = bench, rounds, backend, tiny, methods
        self.row: Row | None = None
        self.tensors: Tensors = {}
        self.expected: Tensors | None = None
        self.floor: tuple[str, Step] | None = None  # the fastest of this row's, by name

    def device(self) -> Record:
        """The device's own figures."""
        return Device(self.bench, self.tiny).measure()

    def open(self, row: Row) -> None:
        """The row in place of the one before."""
        self.row, self.tensors, self.expected, self.floor = None, {}, None, None
        self.bench.release()
        dtype = torch.bfloat16 if self.bench.device == "cuda" else torch.float32
        self.tensors = make_operands(row, row.tiny if self.tiny else row.shape, self.bench.device, dtype)
        self.expected = oracle(row, self.tensors) if row.gated else None
        self.bench.release()
        self.row = row

    def measure(self, row_name: str, method_name: str) -> Record:
        """A method's errors, memory and times, or why there are none; raises where the process is of no more use."""
        if self.row is None or self.row.name != row_name:
            self.open(ROWS[row_name])
        assert self.row is not None
        method = {m.name: m for m in self.methods(self.row, self.backend)}[method_name]
        try:
            record = self.measured(self.row, method)
        except Exception as error:  # reported as this method's result, beside the others'
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
            record = {"status": "absent" if isinstance(error, NOT_HERE) else "failed", "reason": reason[:200]}
        self.bench.release()
        return record

    def measured(self, row: Row, method: Method) -> Record:
        if self.floor is None:
            self.floor = self.fastest_floor(row)
        bare, floor = self.floor
        step = floor if method.name == bare else method.build(row.case, self.tensors)
        record: Record = {"status": "ok", "bare": bare}
        results = step()
        if method.kind != "floor" and self.expected is not None:
            record["errors"] = errors_of(self.expected, results)
            if reason := wrong(method.kind, self.expected, record["errors"]):
                return record | {"status": "wrong", "reason": reason}
        del results
        record["peak_mb"] = self.bench.peak_mb(step)
        return record | self.turns(floor, step)

    def fastest_floor(self, row: Row) -> tuple[str, Step]:
        """The floor by which times are divided: that which takes the least, of which there is one kind or more."""
        steps = {m.name: m.build(row.case, self.tensors) for m in self.methods(row, self.backend) if m.kind == "floor"}
        for step in steps.values():
            step()
        calls = {name: self.bench.calls_of(step) for name, step in steps.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(FLOOR_ROUNDS):
            for name, step in steps.items():
                seconds[name].append(self.bench.seconds_of(step, calls[name]))
        return min(steps.items(), key=lambda x: statistics.median(seconds[x[0]]))

    def turns(self, floor: Step, step: Step) -> Record:
        """Times of a method and of the floor in turn, and their ratios within each round."""
        calls = {name: (run, self.bench.calls_of(run)) for name, run in (("bare", floor), ("step", step))}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(self.rounds):
            if number and time.monotonic() > self.bench.deadline:
                break
            for name in list(calls)[:: -1 if number % 2 else 1]:
                seconds[name].append(self.bench.seconds_of(*calls[name]))
        mine, bare = seconds["step"], seconds["bare"]
        ratios = [1.0 if step is floor else a / b for a, b in zip(mine, bare, strict=True)]
        return {
            "calls": calls["step"][1], "seconds": mine, "bare_seconds": bare,
            "median_s": statistics.median(mine), "spread_s": [min(mine), max(mine)],
            "to_bare": statistics.median(ratios), "to_bare_spread": [min(ratios), max(ratios)],
        }  # fmt: skip


class Apart:
    """A subject in a process of its own, begun anew after a call that raised, died or took too long."""

    def __init__(self, build: Callable[..., Any], *args: Any) -> None:
        self.build, self.args = build, args
        self.worker: Worker | None = None

    def call(self, method: str, *args: Any, timeout: float) -> Record:
        """The subject's record, or why there is none."""
        if self.worker is None:
            self.worker = Worker(self.build, *self.args)
        try:
            return self.worker.call(method, *args, timeout=timeout)
        except WorkerError as error:
            self.stop()
            return {"status": "failed", "reason": str(error)[:200]}

    def stop(self) -> None:
        """Ends the process, which gives back all the memory that it had."""
        if self.worker is not None:
            self.worker.stop()
            self.worker = None


def gpu_environment(device: str) -> Record:
    """The machine and versions, and the GPU's name, driver and clocks as found."""
    out = environment() | {"device": device}
    if device == "cuda":
        p = torch.cuda.get_device_properties(0)
        query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit"
        out |= {
            "gpu": p.name, "gpu_gib": round(p.total_memory / 2**30, 1), "cuda": torch.version.cuda,
            "driver_clocks_power": said("nvidia-smi", query, "--format=csv,noheader"),
            "capability": f"{p.major}.{p.minor}",
        }  # fmt: skip
    return out
