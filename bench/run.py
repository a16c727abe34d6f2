"""Run the benchmark: `python -m bench.run [--quick] [--cases loss,ppo] [--out bench/results/NAME.jsonl]`.

For each case: float64 reference; then each method in a process of its own: gate and memory, and a new process for each
of the rounds, in which the methods take turns in a different order. One process lives at a time. Ratios are of the
least of the rounds. Others' methods and bare products that are far behind the fastest bare products have one round.
With --keep-memory a timed call may use the memory of an untimed one again, and with --allocator, a library such as
jemalloc's that is preloaded where calls are timed, always; with neither, every large tensor is new memory, as glibc
has it.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from bench.cases import CASES, SHAPES, Case, Shape, make_tensors
from bench.gate import LIMIT, errors_against, write_oracle
from bench.harness import (
    MB,
    THREADS,
    ResidentPeak,
    Worker,
    WorkerError,
    freed_memory_kept,
    preloaded,
    release_memory,
    resident_bytes,
    results,
    timed,
)
from bench.peers import Method, chosen
from bench.ratios import add_ratios

LEAST_SECONDS = 0.2  # a timing repeats its call until it takes this long
FAR = 1.25  # times the fastest bare products; a method that is further is timed in one round: its ratio is no close one
QUIET = 0.05  # of the machine; beyond it, waiting for one another makes any ratio meaningless
Record = dict[str, Any]


class Subject:
    """One method on one case, inside its own process."""

    def __init__(self, case_name: str, shape: Shape, method: Method, keep_memory: bool = False) -> None:
        case = CASES[case_name]
        self.keep_memory = keep_memory
        self.tensors = make_tensors(case, shape)
        self.step = method.build(case, self.tensors)

    def run(self) -> None:
        self.step()

    def gate(self, oracle: Path) -> dict[str, float]:
        return errors_against(oracle, self.step())

    def memory(self) -> tuple[float, float, float]:
        """MB above the inputs: the peak while it runs, and what stays when its results are gone. And its seconds."""
        release_memory()
        start = time.perf_counter()
        with ResidentPeak() as peak:
            results = self.step()
        seconds = time.perf_counter() - start
        del results
        release_memory()
        return peak.above_mb, (resident_bytes() - peak.baseline) / MB, seconds

    def seconds(self, calls: int) -> tuple[float, float]:
        with freed_memory_kept() if self.keep_memory else nullcontext():
            self.step()  # loads what is loaded once, and takes the memory that kept memory is
            return timed(self.step, calls)


class Oracle:
    def __init__(self, case_name: str, shape: Shape) -> None:
        self.case, self.shape = CASES[case_name], shape

    def write(self, folder: Path) -> None:
        with freed_memory_kept():  # a fifth less time
            write_oracle(self.case, self.shape, folder)


class Crew:
    """Processes for the methods of one case, one at a time, each below a memory limit."""

    def __init__(
        self, case: Case, shape: Shape, keep_memory: bool, limit_gb: float, allocator: Path | None = None
    ) -> None:
        self.case, self.shape, self.keep_memory, self.limit_gb = case, shape, keep_memory, limit_gb
        self.allocator = allocator

    def write_oracle(self, folder: Path) -> None:
        with Worker(Oracle, self.case.name, self.shape) as worker:
            worker.call("write", folder, watch=partial(self._watch, worker))

    @contextmanager
    def process(self, method: Method, timed: bool = False) -> Iterator[Callable[..., Any]]:
        """call(name, ...) of a new process's `Subject`: a process keeps a speed of its own for all of its life."""
        with preloaded(self.allocator if timed else None):
            worker = Worker(Subject, self.case.name, self.shape, method, self.keep_memory)
        with worker:
            yield partial(worker.call, watch=partial(self._watch, worker))

    def _watch(self, worker: Worker) -> None:
        used = worker.resident_bytes() / 1e9
        if used > self.limit_gb:
            raise WorkerError(f"its process holds {used:.1f} GB, more than --memory-limit-gb")


def qualify(crew: Crew, method: Method, oracle: Path) -> Record:
    """Gate and memory of one method; the first call of all, too. A method that fails is not timed."""
    record: Record = {"method": method.name, "method_kind": method.kind, "status": "ok", "seconds": []}
    try:
        with crew.process(method) as call:
            if method.kind == "floor":
                call("run")
            else:
                record["errors"] = call("gate", oracle)
                worst = max(record["errors"], key=record["errors"].__getitem__)
                if record["errors"][worst] > LIMIT:
                    return record | {"status": "wrong", "reason": f"{worst} is off by {record['errors'][worst]:.1e}"}
            record["peak_mb"], record["kept_mb"], record["once_s"] = call("memory")
            record["calls"] = max(1, round(LEAST_SECONDS / record["once_s"]))
    except WorkerError as error:
        record |= {"status": "failed", "reason": str(error)}
    return record


def quickest(record: Record) -> float:
    return min([record["once_s"], *record["seconds"]])


def far_behind(record: Record, records: list[Record]) -> bool:
    """Whether even its quickest call, the one that measured its memory included, took FAR times the fastest floor's.

    Never so are ours, whose goals the ratios are, and plain torch, which the other ratios are over.
    """
    if record["method_kind"] == "ours" or record["method"] == "torch":
        return False
    floors = [quickest(r) for r in records if r["method_kind"] == "floor" and r["status"] == "ok"]
    return quickest(record) > FAR * min(floors, default=float("inf"))


def run_rounds(crew: Crew, methods: Sequence[Method], records: list[Record], rounds: int) -> None:
    """Add to each record one time a round; the order changes from round to round."""
    running = [(m, r) for m, r in zip(methods, records, strict=True) if r["status"] == "ok"]
    for number in range(rounds):
        for method, record in random.Random(number).sample(running, len(running)):
            if record["status"] == "ok" and not (record["seconds"] and far_behind(record, records)):
                try:
                    with crew.process(method, timed=True) as call:
                        wall, others = call("seconds", record["calls"])
                except WorkerError as error:
                    record |= {"status": "failed", "reason": str(error)}
                    continue
                record["seconds"].append(wall)
                record.setdefault("others", []).append(round(others, 3))


def run_case(
    case: Case,
    shape: Shape,
    methods: Sequence[Method],
    rounds: int = 5,
    limit_gb: float = 20.0,
    keep_memory: bool = False,
    allocator: Path | None = None,
) -> list[Record]:
    crew, records = Crew(case, shape, keep_memory, limit_gb, allocator), []
    with tempfile.TemporaryDirectory() as folder:
        crew.write_oracle(Path(folder))
        for method in methods:
            records.append(qualify(crew, method, Path(folder)))
            print(f"  {method.name}: {describe(records[-1])}", flush=True)
    run_rounds(crew, methods, records, rounds)
    add_ratios(records)
    about = {
        "kind": "result",
        "case": case.name,
        "shape": [shape.tokens, shape.hidden, shape.vocab],
        "gradient_mb": case.gradient_bytes(shape) / MB,
    }
    return [about | record for record in records]


def describe(record: Record) -> str:
    if record["status"] != "ok":
        return f"{record['status']}: {record['reason']}"
    error = f", error {max(record['errors'].values()):.1e}" if "errors" in record else ""
    seconds = record.get("least_s", record.get("median_s"))  # a GPU's rounds are short and many
    timed = "" if seconds is None else f"{seconds:.3f} s, "
    ratio = f"{record['to_bare']:.2f} x bare, " if "to_bare" in record else ""
    return f"{timed}{ratio}{record['peak_mb']:.0f} MB{error}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes: a check of the benchmark, not a result")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated, of: %(default)s")
    parser.add_argument("--methods", default="", help="comma-separated beginnings of names; the floors always run")
    parser.add_argument("--shape", type=_shape, help="tokens,hidden,vocabulary instead of the default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep-memory", action="store_true", help="timed calls use freed memory again")
    parser.add_argument("--allocator", type=Path, help="a library that is preloaded where calls are timed")
    parser.add_argument("--memory-limit-gb", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    options = parser.parse_args(arguments)
    try:
        options.methods = chosen(options.cases.split(","), options.methods.split(","), ("floor",))
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.allocator and not options.allocator.is_file():
        parser.error(f"--allocator: expected a library, got {options.allocator}, which is no file")
    options.shape = options.shape or SHAPES["quick" if options.quick else "full"]
    return options


def _shape(text: str) -> Shape:
    tokens, hidden, vocab = (int(number) for number in text.split(","))
    if min(tokens, hidden, vocab) < 1:
        raise ValueError(text)
    return Shape(tokens, hidden, vocab)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    kept = options.keep_memory or options.allocator
    about = {"freed_memory": "kept" if kept else "fresh"}
    if options.allocator:
        about["allocator"] = options.allocator.resolve().name
    write, ours = results(options.out, THREADS, **about), []
    for case, methods in ((CASES[name], methods) for name, methods in options.methods.items()):
        print(f"{case.name}: {case.title}, {options.shape}", flush=True)
        memory = options.memory_limit_gb, options.keep_memory, options.allocator
        found = run_case(case, options.shape, methods, options.rounds, *memory)
        for record in found:
            print(f"{record['method']:>40}  {describe(record)}", flush=True)
        others = [share for record in found for share in record.get("others", ())]
        if others and max(others) > QUIET:
            print(f"  NOT QUIET: other processes took up to {max(others):.0%} of the machine; run it again alone")
        ours += [r["status"] for r in found if r["method_kind"] == "ours"]
        for record in found:  # a case at a time, so that an interrupted run keeps what it has
            write(record)
    return int(any(status != "ok" for status in ours))


if __name__ == "__main__":
    sys.exit(main())
