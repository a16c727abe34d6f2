"""One run on a machine with a GPU: correctness, then the whole table against the peers that are installed.

    bench/gpu.sh [check|table|extras|tune|all] [--out FILE] [--rows loss,values] [--seconds 480] [--tiny]

`all` is check and table; `tune` writes launch sizes. Each ends by itself soon after `--seconds`, naming what is left.
The result is one JSON-lines file (GPU, driver and versions inside), and beside it one plot where matplotlib is there.
Nothing is fetched: a peer that is not installed is named with its reason. `extras` runs the project's own commands, and
so needs what these import (tyro, transformers). `--tiny` runs every part on toy shapes, on a CPU under Triton's
interpreter where TRITON_INTERPRET=1: a check of the benchmark.
"""

import argparse
import faulthandler
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu_rows import IN_A_GRAPH, ROWS, Row, errors_of, make_operands, methods, oracle
from bench.harness import MB, environment, said, write_line
from bench.run import add_ratios, describe

CHECK_SHARE = 0.3  # of the seconds of `all`
CHECK_PROCESSES = 4  # on a GPU, where most of the time goes into compiling kernels on one core
SLOW_SECONDS = 45.0  # that torch.compile may take for one row
GRACE = 55.0  # seconds for what has begun
GROSS = 0.1  # an error that no rounding makes: of a mean loss, a log-prob in nats, or of a gradient's largest entry
LEAST_SECONDS = 0.2  # a timing repeats its call until it takes about this long
Record = dict[str, Any]


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


class Bench:
    """Runs methods one at a time on one device, until its seconds are spent."""

    def __init__(self, device: str, seconds: float, rounds: int) -> None:
        self.device, self.rounds, self.deadline = device, rounds, time.monotonic() + seconds

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def release(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def peak_mb(self, step: Any, row: Row) -> float:
        """Peak memory of a call above what was there, its gradients included."""
        if self.device != "cuda":
            step()
            return 0.0
        self.release()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / MB

    def seconds_of(self, step: Any, calls: int) -> float:
        """Seconds of one call, by the device's own clock where it has one."""
        if self.device != "cuda":
            begin = time.perf_counter()
            for _ in range(calls):
                step()
            return (time.perf_counter() - begin) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            step()
        end.record()
        self.wait()
        return begin.elapsed_time(end) / 1e3 / calls

    def qualify(self, name: str, kind: str, step: Any, row: Row, expected: Any) -> Record:
        """Errors, memory, and how often a timing calls it; the warm-up as well."""
        record: Record = {"method": name, "method_kind": kind, "status": "ok", "seconds": []}
        results = step()
        if kind != "floor" and expected is not None:
            record["errors"] = errors_of(expected, results)
            worst = max(record["errors"], key=record["errors"].__getitem__)
            if not record["errors"][worst] < GROSS:
                return record | {"status": "wrong", "reason": f"{worst} is off by {record['errors'][worst]:.1e}"}
        del results
        record["peak_mb"], record["kept_mb"] = self.peak_mb(step, row), 0.0
        record["calls"] = max(1, min(50, round(LEAST_SECONDS / max(1e-6, self.seconds_of(step, 1)))))
        return record

    def row(self, row: Row, tiny: bool, backend: str | None, only: tuple[str, ...] = ("",)) -> list[Record]:
        """All methods of one row, taking turns."""
        shape = row.tiny if tiny else row.shape
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        tensors, expected = {}, None
        if time.monotonic() < self.deadline:
            tensors = make_operands(row, shape, self.device, dtype)
            expected = oracle(row, tensors) if row.gated else None
        self.release()
        records, steps = [], {}
        for method in methods(row, backend):
            if not method.name.startswith((*only, "bare GEMMs")):
                continue
            begin, record = time.monotonic(), {"method": method.name, "method_kind": method.kind, "seconds": []}
            if begin > self.deadline - (SLOW_SECONDS if method.name == "torch.compile" else 0.0):
                record |= {"status": "failed", "reason": "no time left"}
            else:
                try:
                    steps[method.name] = method.build(row.case, tensors)
                    record = self.qualify(method.name, method.kind, steps[method.name], row, expected)
                except Exception as error:  # reported as this method's result, beside the others'
                    lines = str(error).strip().splitlines()
                    reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
                    record |= {"status": "failed", "reason": reason[:200]}
                self.release()
            records.append(record)
            print(f"  {method.name}: {describe(record)} [{time.monotonic() - begin:.1f} s]", flush=True)
        expected = None
        self.release()
        self.take_turns(records, steps)
        add_ratios(records)
        limits = {"time_limit": row.time_limit, "memory_limit_mib": row.memory_limit, "budget": row.budget}
        about = {
            "kind": "gpu-result", "case": row.name, "title": row.title, "dtype": str(dtype).removeprefix("torch."),
            "shape": [shape.tokens, shape.hidden, shape.vocab], "gradient_mb": row.case.gradient_bytes(shape) / MB,
        }  # fmt: skip
        return [about | limits | record for record in records]

    def take_turns(self, records: list[Record], steps: dict[str, Any]) -> None:
        running = [r for r in records if r["status"] == "ok"]
        for number in range(self.rounds if running else 0):
            if number and time.monotonic() > self.deadline:
                break
            for record in running[number % len(running) :] + running[: number % len(running)]:
                record["seconds"].append(self.seconds_of(steps[record["method"]], record["calls"]))


def check(device: str, seconds: float, out: Path | None) -> int:
    """The correctness suite, every case of the Triton backend, in processes of its own; 1 where a case failed."""
    processes = CHECK_PROCESSES if device == "cuda" else 1
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.vocab.triton_cases", "--device", device]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / str(i) for i in range(processes)]
        running = [
            subprocess.Popen(
                [*command, "--seconds", f"{seconds:g}", "--share", f"{i}/{processes}", "--report", str(report)]
            )
            for i, report in enumerate(reports)
        ]
        codes = _ended(running, begin + seconds + 0.8 * GRACE)  # before this process is ended itself
        found = [json.loads(report.read_text()) for report in reports if report.exists()]
    record: Record = {"kind": "gpu-check", "device": device, "seconds": round(time.monotonic() - begin, 1)}
    record |= {name: [case for part in found for case in part[name]] for name in ("passed", "failed", "left")}
    record["broken_processes"] = processes - len(found)
    print(f"check: {len(record['passed'])} cases passed, {len(record['failed'])} failed, {len(record['left'])} not run")
    if out is not None:
        write_line(out, record)
    return int(any(codes))


def _ended(running: list["subprocess.Popen[bytes]"], deadline: float) -> list[int]:
    """Exit statuses; whatever still runs at the deadline, or when waiting is interrupted, is killed: it has the GPU."""
    try:
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print("check: killed what had not ended in time", flush=True)
    finally:
        for process in running:
            process.kill()  # nothing, where it has ended
    return [process.wait() for process in running]


def table(options: argparse.Namespace, device: str) -> int:
    """Every row into the result file; 1 where ours is wrong or failed."""
    bench = Bench(device, options.seconds, options.rounds)
    backend = "triton" if device == "cpu" else None  # on a GPU what a call gets
    found: list[Record] = []
    for name in options.rows:
        row = ROWS[name]
        print(f"{name}: {row.title}, {row.tiny if options.tiny else row.shape}", flush=True)
        records = bench.row(row, options.tiny, backend, tuple(options.methods.split(",")))
        for record in records:  # a row at a time, so that an interrupted run keeps what it has
            write_line(options.out, record)
        found += records
    print("\n".join(summary(found)))
    draw_if_possible(found, options.out)
    return int(any(r["status"] != "ok" and r["reason"] != "no time left" for r in found if r["method"] == "logitless"))


def summary(records: list[Record]) -> Iterator[str]:
    """A Markdown table: times the bare GEMMs, memory above inputs and fp32 gradients, errors of values and these."""
    yield "| work | shape | bare GEMMs | logitless | to reach | fastest other | memory above | errors |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in dict.fromkeys(r["case"] for r in records):
        rows = {r["method"]: r for r in records if r["case"] == name}
        mine, bare = rows["logitless"], rows["bare GEMMs"]
        graph = rows.get(IN_A_GRAPH, {"status": "absent"})
        if graph["status"] == mine["status"] == "ok":
            mine = graph | {"title": f"{graph['title']}, in a CUDA graph", "peak_mb": mine["peak_mb"]}
        shape = " x ".join(f"{x:,}" for x in mine["shape"])
        if mine["status"] != "ok" or bare["status"] != "ok":
            yield f"| {mine['title']} | {shape} | | {mine['status']}: {mine.get('reason', '')} | | | | |"
            continue
        others = [r for r in rows.values() if r["method_kind"] == "peer" and r["status"] == "ok"]
        best = min(others, key=lambda r: statistics.median(r["seconds"]), default=None)
        other = "-" if best is None else f"{best['method']} {best['to_bare']:.2f} x"
        limit = "-" if mine["time_limit"] is None else f"{mine['time_limit']:.2f} x"
        above = f"{max(0.0, mine['peak_mb'] - mine['gradient_mb']):,.0f} MB"
        error = " / ".join(_worst(mine.get("errors", {}), gradients) for gradients in (False, True))
        times = f"{1e3 * bare['median_s']:.2f} ms | **{mine['to_bare']:.3f} x**"
        yield f"| {mine['title']} | {shape} | {times} | {limit} | {other} | {above} | {error} |"


def _worst(errors: dict[str, float], gradients: bool) -> str:
    found = [x for name, x in errors.items() if name.startswith("grad") == gradients]
    return f"{max(found):.0e}" if found else "-"


def draw_if_possible(records: list[Record], out: Path) -> None:
    """A bar for each method of each row: time over the bare GEMMs."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r["case"] for r in records))
    figure, axes = plt.subplots(len(names), 1, figsize=(8, 1.7 * len(names)), squeeze=False, layout="constrained")
    for name, (axis,) in zip(names, axes, strict=True):
        rows = [r for r in records if r["case"] == name and "to_bare" in r and r["method_kind"] != "floor"]
        rows.sort(key=lambda r: r["to_bare"], reverse=True)
        colours = ["#1f6feb" if r["method_kind"] == "ours" else "#e0a458" for r in rows]
        bars = axis.barh([r["method"] for r in rows], [min(6.0, r["to_bare"]) for r in rows], color=colours)
        axis.bar_label(bars, [f"{r['to_bare']:.2f} ×, {r['peak_mb']:,.0f} MB" for r in rows], padding=3, fontsize=7)
        axis.axvline(1.0, color="#57606a", linewidth=1, linestyle="--")
        axis.set_xlim(0, 8)
        axis.set_title(f"{ROWS[name].title}: {ROWS[name].shape}", loc="left", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.savefig(out.with_suffix(".png"), dpi=150)
    plt.close(figure)
    print(f"wrote {out.with_suffix('.png')}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="all", choices=("all", "check", "table", "extras", "tune"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu.jsonl"), help="must not exist")
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated, of: %(default)s")
    parser.add_argument("--methods", default="", help="comma-separated beginnings of names; the bare GEMMs always run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480.0, help="for all of it; what is left then is named")
    parser.add_argument("--parts", default="", help="of the extras, comma-separated; all unless given")
    parser.add_argument("--tiny", action="store_true", help="toy shapes: a check of the benchmark, not a result")
    options = parser.parse_args(arguments)
    options.rows = options.rows.split(",")
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; choose from {', '.join(ROWS)}")
    if options.out.exists() and options.what != "check":
        parser.error(f"{options.out} exists already; name another file")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("torch sees no GPU; on a CPU only --tiny makes sense, with TRITON_INTERPRET=1")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # should a peer hang; what was found is on disk by then
    faulthandler.dump_traceback_later(options.seconds + GRACE, exit=True, file=2)
    try:
        return run(options, parser, device)
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(options: argparse.Namespace, parser: argparse.ArgumentParser, device: str) -> int:
    """What was asked for; an exit status."""
    if options.what == "tune":
        from bench.gpu_tune import tune

        return tune(options.out, options.tiny, device, options.seconds)
    if options.what == "extras":
        from bench.gpu_extras import PARTS, extras

        parts = options.parts.split(",") if options.parts else list(PARTS)
        if unknown := [name for name in parts if name not in PARTS]:
            parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
        return extras(options.out, options.tiny, device, options.seconds, parts)
    if options.what == "check":
        return check(device, options.seconds, None)
    begin = time.monotonic()
    write_line(options.out, gpu_environment(device))
    status = check(device, CHECK_SHARE * options.seconds, options.out) if options.what == "all" else 0
    options.seconds -= time.monotonic() - begin
    return table(options, device) or status


if __name__ == "__main__":
    sys.exit(main())
