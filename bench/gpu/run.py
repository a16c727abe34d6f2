"""One run on a machine with a GPU: correctness, then the whole table against the peers that are installed.

    bench/gpu.sh [check|table|profile|extras|tune|all] [--out FILE] [--rows loss,values] [--seconds 480] [--tiny]
    bench/gpu.sh --from FILE

`all` is check and table; `profile` says where the time of a call goes; `tune` writes launch sizes. Each ends by itself
soon after `--seconds`, naming what is left.
The result is one JSON-lines file (GPU, driver and versions inside), and beside it one plot where matplotlib is there.
A result is in the file as soon as it is found: `--from` shows those of a run that was killed. The exit status is 1
where one of ours is wrong, failed or was not run, a case of the check included, and 2 where all are right and a target
is missed; each of these is named below the table.
Nothing is fetched: a peer that is not installed is named with its reason. `extras` runs the project's own commands, and
so needs what these import (tyro, transformers). `--tiny` runs every part on toy shapes, on a CPU under Triton's
interpreter where TRITON_INTERPRET=1: a check of the benchmark.
"""

import argparse
import faulthandler
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.cases import Shape
from bench.gpu.measure import GRACE, MOST_SECONDS, Apart, Subject, gpu_environment
from bench.gpu.rows import FASTER, IN_A_GRAPH, IN_FP32, MIB, RIVAL, ROWS, Row, methods
from bench.gpu.timing import Bench, Record
from bench.harness import MB, read_lines, write_line
from bench.peers import Method, check_begun
from bench.run import describe

CHECK_SHARE = 0.3  # of the seconds of `all`
CHECK_PROCESSES = max(1, min(12, (os.cpu_count() or 1) - 2))  # on a GPU: most of the time goes into compiling
SLOW_SECONDS = 45.0  # that torch.compile may take for one row
OUT = Path("bench/results/gpu.jsonl")
WHAT = ("all", "check", "table", "profile", "extras", "tune")
MISSING: Record = {"status": "not run", "reason": "not in the file"}


def check(device: str, seconds: float, out: Path | None) -> int:
    """The correctness suite, every case of the Triton backend, in processes of its own; 1 unless all of it passed.

    Each case is a line beside `out`, in NAME.cases.jsonl, as it begins and as it ends.
    """
    processes = CHECK_PROCESSES if device == "cuda" else 1
    command = [sys.executable, "-m", "tests.support.vocab.triton_run", "--device", device]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "cases.jsonl" if out is None else out.with_suffix(".cases.jsonl")
        report.unlink(missing_ok=True)
        options = ("--seconds", f"{seconds:g}", "--report", str(report))
        running = [subprocess.Popen([*command, *options, "--share", f"{i}/{processes}"]) for i in range(processes)]
        codes = _ended(running, begin + seconds + 0.8 * GRACE)  # before this process is ended itself
        found = outcomes(read_lines(report) if report.exists() else [])
    record: Record = {"kind": "gpu-check", "device": device, "seconds": round(time.monotonic() - begin, 1), **found}
    record["broken_processes"] = sum(code not in (0, 1) for code in codes)
    counts = "{} cases passed, {} skipped, {} failed, {} not run".format(
        *(len(found[x]) for x in ("passed", "skipped", "failed", "left"))
    )
    print(f"check: {counts}; began and did not end: {', '.join(found['broken']) or 'none'}")
    if out is not None:
        write_line(out, record)
    return int(any(codes) or any(found[x] for x in ("failed", "broken", "left")))


def outcomes(lines: list[Record]) -> dict[str, list[str]]:
    """The cases' names by outcome, from the lines that they leave: broken began and did not end."""
    ended = {line["ended"]: line for line in lines if "ended" in line}
    begun = [line["begun"] for line in lines if "begun" in line]
    return {
        "passed": [name for name, line in ended.items() if not (line["error"] or line["skipped"])],
        "skipped": [name for name, line in ended.items() if line["skipped"]],
        "failed": [name for name, line in ended.items() if line["error"]],
        "broken": [name for name in begun if name not in ended],
        "left": [name for line in lines for name in line.get("names", ()) if name not in begun],
    }


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
    """The device's figures and every row into the file, ours of all rows before any peer; returns `show`'s status."""
    bench = Bench(device, time.monotonic() + options.seconds)
    backend = "triton" if device == "cpu" else None  # on a GPU what a call gets
    subject = Apart(Subject, bench, options.rounds, backend, options.tiny, torch.get_num_threads(), methods)
    try:
        if time.monotonic() < bench.deadline:
            found = subject.call("device", timeout=MOST_SECONDS)
            write_line(options.out, {"kind": "gpu-device", "device": device} | found)
            print(f"device: {found}", flush=True)
        for kinds in (("floor", "ours"), ("peer",)):
            for row in (ROWS[name] for name in options.rows):
                print(f"{row.name}: {row.title}, {row.tiny if options.tiny else row.shape}", flush=True)
                for method in methods(row, backend):
                    named = any(map(method.begins, options.methods))
                    if method.kind in kinds and (method.kind == "floor" or named):
                        found = measured(subject, row, method, bench.deadline)
                        write_line(options.out, about(row, method.name, options.tiny, device) | found)
    finally:
        subject.stop()
    return show(options.out)


def about(row: Row, method: str, tiny: bool, device: str) -> Record:
    """What each result of a method says of its row."""
    shape, dtype = row.tiny if tiny else row.shape, torch.bfloat16 if device == "cuda" else torch.float32
    gradients = row.case.gradient_bytes(shape, dtype, torch.float32 if method == IN_FP32 else dtype)
    return {
        "kind": "gpu-result", "case": row.name, "title": row.title, "dtype": str(dtype).removeprefix("torch."),
        "shape": [shape.tokens, shape.hidden, shape.vocab], "gradient_mb": gradients / MB,
        # toy shapes have nothing to reach
        "time_limit": None if tiny else row.time_limit, "memory_limit_mib": None if tiny else row.memory_limit,
        "budget": row.budget,
    }  # fmt: skip


def measured(subject: Apart, row: Row, method: Method, deadline: float) -> Record:
    """A method's result in the other process, whatever becomes of that."""
    begin = time.monotonic()
    record: Record = {"method": method.name, "method_kind": method.kind, "seconds": []}
    if begin > deadline - (SLOW_SECONDS if method.name == "torch.compile" else 0.0):
        record |= {"status": "not run", "reason": "no time left"}
    else:
        timeout = min(MOST_SECONDS, deadline + GRACE / 2 - begin)
        record |= subject.call("measure", row.name, method.name, timeout=timeout)
    print(f"  {method.name}: {describe(record)} [{time.monotonic() - begin:.1f} s]", flush=True)
    return record


def show(file: Path) -> int:
    """The table and the plot of a result file; 1 where one of ours is not right in it, 2 where it misses a target."""
    found = [r for r in read_lines(file) if r["kind"] == "gpu-result"]
    if not found:
        print(f"no results of the table in {file}")
        return 1
    print("\n".join(summary(found)))
    draw_if_possible(found, file)
    broken, missed = list(faults(found)), list(targets_missed(found))
    print(*broken, *missed, sep="\n", end="\n" if broken or missed else "")
    return 1 if broken else 2 if missed else 0


def faults(records: list[Record]) -> Iterator[str]:
    """Which of ours are wrong, failed or were not run, a line for each; what cannot run here is none of them."""
    for rows in by_row(records):
        mine = {name: r for name, r in rows.items() if r.get("method_kind") == "ours" and name != "ours"}
        for name, r in ({"logitless": MISSING} | mine).items():
            if r["status"] not in (("ok",) if name == "logitless" else ("ok", "absent")):
                yield f"{r['status']}: {next(iter(rows.values()))['case']}: {name}: {r['reason']}"


def by_row(records: list[Record]) -> Iterator[dict[str, Record]]:
    """Each row's records by method, and as `ours` the one that counts: in a CUDA graph where there is such a one."""
    for name in dict.fromkeys(r["case"] for r in records):
        rows = {r["method"]: r for r in records if r["case"] == name}
        mine, graph = rows.get("logitless", MISSING), rows.get(IN_A_GRAPH, MISSING)
        yield rows | {
            "ours": graph | {"peak_mb": mine["peak_mb"]} if "ok" == graph["status"] == mine["status"] else mine
        }


def targets_missed(records: list[Record]) -> Iterator[str]:
    """What ours was to reach and did not, a line for each; a rival's time only where it was measured."""
    for rows in by_row(records):
        yield from _slower_than_rival(rows)
        ours = rows["ours"]
        if ours["status"] != "ok":
            continue
        if ours["time_limit"] is not None and ours["to_bare"] > ours["time_limit"]:
            yield f"missed: {ours['case']}: {ours['to_bare']:.3f} x the floor, to reach {ours['time_limit']:.2f} x"
        above, most = ours["peak_mb"] - ours["gradient_mb"], ours["memory_limit_mib"]
        if most is not None and above * MB > most * MIB:
            yield f"missed: {ours['case']}: {above:,.0f} MB above, to reach {most * MIB / MB:,.0f} MB"


def _slower_than_rival(rows: dict[str, Record]) -> Iterator[str]:
    rival = rows.get(RIVAL, MISSING)
    for name in FASTER if rival["status"] == "ok" and rival["time_limit"] is not None else ():
        mine = rows.get(name, MISSING)
        if mine["status"] == "ok" and mine["to_bare"] >= rival["to_bare"]:
            theirs = f"{RIVAL}'s {rival['to_bare']:.3f} x"
            yield f"missed: {mine['case']}: {name} {mine['to_bare']:.3f} x, to be faster than {theirs}"


def summary(records: list[Record]) -> Iterator[str]:
    """A Markdown table: times the fastest floor, memory above inputs and gradients, errors of values and these."""
    yield "| work | shape | floor | logitless | to reach | memory above | errors | fastest other | its errors |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for rows in by_row(records):
        row, mine = next(iter(rows.values())), rows.pop("ours")
        floors = [r for r in rows.values() if r["method_kind"] == "floor"]
        bare = min(floors, key=lambda r: r.get("median_s", math.inf), default=MISSING)
        work = f"{row['title']} | {' x '.join(f'{x:,}' for x in row['shape'])}"
        broken = [r for r in (mine, bare) if r["status"] != "ok"]
        if broken:
            yield f"| {work} | | {broken[0]['status']}: {broken[0]['reason']} | | | | | |"
            continue
        if mine["method"] == IN_A_GRAPH:
            work = work.replace(" |", ", in a CUDA graph |")
        others = [r for r in rows.values() if r["method_kind"] == "peer" and r["status"] == "ok"]
        best = min(others, key=lambda r: r["to_bare"], default=None)
        other = "- | -" if best is None else f"{best['method']} {best['to_bare']:.2f} x | {worst_errors(best)}"
        limit = "-" if mine["time_limit"] is None else f"{mine['time_limit']:.2f} x"
        limit += f", faster than {RIVAL}" if RIVAL in rows and mine["time_limit"] is not None else ""
        above = f"{max(0.0, mine['peak_mb'] - mine['gradient_mb']):,.0f} MB"
        times = f"{1e3 * bare['median_s']:.2f} ms | **{mine['to_bare']:.3f} x**"
        yield f"| {work} | {times} | {limit} | {above} | {worst_errors(mine)} | {other} |"


def worst_errors(record: Record) -> str:
    """The largest of values, in nats, and of gradients, relative to their largest entry."""
    return " / ".join(_worst(record.get("errors", {}), gradients) for gradients in (False, True))


def _worst(errors: dict[str, float], gradients: bool) -> str:
    found = [x for name, x in errors.items() if name.startswith("grad") == gradients]
    return f"{max(found):.0e}" if found else "-"


def draw_if_possible(records: list[Record], out: Path) -> None:
    """A bar for each method of each row: time over the fastest floor."""
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
        rows_of = [r for r in records if r["case"] == name]
        rows = [r for r in rows_of if "to_bare" in r and r["method_kind"] != "floor"]
        rows.sort(key=lambda r: r["to_bare"], reverse=True)
        colours = ["#1f6feb" if r["method_kind"] == "ours" else "#e0a458" for r in rows]
        bars = axis.barh([r["method"] for r in rows], [min(6.0, r["to_bare"]) for r in rows], color=colours)
        axis.bar_label(bars, [f"{r['to_bare']:.2f} ×, {r['peak_mb']:,.0f} MB" for r in rows], padding=3, fontsize=7)
        axis.axvline(1.0, color="#57606a", linewidth=1, linestyle="--")
        axis.set_xlim(0, 8)
        axis.set_title(f"{rows_of[0]['title']}: {Shape(*rows_of[0]['shape'])}", loc="left", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.savefig(out.with_suffix(".png"), dpi=150)
    plt.close(figure)
    print(f"wrote {out.with_suffix('.png')}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="all", choices=WHAT)
    default = f"{OUT}; of check alone: none; of tune: the file of this GPU's sizes, which it writes over"
    parser.add_argument("--out", type=Path, help=f"must not exist (default: {default})")
    parser.add_argument("--from", type=Path, dest="source", help="measure nothing: table and plot of this result file")
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated, of: %(default)s")
    parser.add_argument("--methods", default="", help="comma-separated beginnings of names; the floors always run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480.0, help="for all of it; what is left then is named")
    parser.add_argument("--calls", default="", help="that are profiled, comma-separated; all unless given")
    parser.add_argument("--parts", default="", help="of the extras, or beginnings of what is tuned; all unless given")
    parser.add_argument("--tiny", action="store_true", help="toy shapes: a check of the benchmark, not a result")
    options = parser.parse_args(arguments)
    if options.source is not None:
        return show(options.source)
    options.rows = options.rows.split(",")
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; choose from {', '.join(ROWS)}")
    options.methods = options.methods.split(",")
    try:
        check_begun(options.methods, {name: tuple(methods(ROWS[name], None)) for name in options.rows})
    except ValueError as error:
        parser.error(str(error))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # this GPU's sizes are found anew, beside what the file says was tried before; toy shapes' are nobody's
    renews = options.what == "tune" and options.out is None and device == "cuda" and not options.tiny
    if options.out is None and options.what != "check":
        options.out = sizes_file(device) if options.what == "tune" else OUT
    if options.out is not None and options.out.exists() and not renews:
        parser.error(f"{options.out} exists already; name another file")
    if device == "cpu" and not options.tiny:
        parser.error("torch sees no GPU; on a CPU only --tiny makes sense, with TRITON_INTERPRET=1")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    # should this process hang; what was found is on disk by then
    faulthandler.dump_traceback_later(options.seconds + GRACE, exit=True, file=2)
    try:
        return run(options, parser, device)
    finally:
        faulthandler.cancel_dump_traceback_later()


def sizes_file(device: str) -> Path:
    """Where the library looks for the launch sizes of this device."""
    name = "interpreter" if device == "cpu" else torch.cuda.get_device_name()
    return Path("src/logitless/vocab/backends/triton/sizes") / f"{name.lower().replace(' ', '-')}.json"


def run(options: argparse.Namespace, parser: argparse.ArgumentParser, device: str) -> int:
    """What was asked for; an exit status."""
    if options.what == "tune":
        from bench.gpu.tune import tune

        return tune(options.out, options.tiny, device, options.seconds, options.parts.split(","))
    if options.what == "profile":
        from bench.gpu.counts.calls import CALLS
        from bench.gpu.profile import profiles

        names = options.calls.split(",") if options.calls else list(CALLS)
        if unknown := [name for name in names if name not in CALLS]:
            parser.error(f"unknown call {unknown[0]!r}; choose from {', '.join(CALLS)}")
        return profiles(options.out, device, options.seconds, names)
    if options.what == "extras":
        from bench.gpu.extras import PARTS, extras

        parts = options.parts.split(",") if options.parts else list(PARTS)
        if unknown := [name for name in parts if name not in PARTS]:
            parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
        return extras(options.out, options.tiny, device, options.seconds, parts)
    begin = time.monotonic()
    if options.out is not None:
        write_line(options.out, gpu_environment(device))
    if options.what == "check":
        return check(device, options.seconds, options.out)
    status = check(device, CHECK_SHARE * options.seconds, options.out) if options.what == "all" else 0
    options.seconds -= time.monotonic() - begin
    return max(table(options, device), status, key=(0, 2, 1).index)  # 1 says more than 2


if __name__ == "__main__":
    sys.exit(main())
