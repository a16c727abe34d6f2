"""Scoring, decoding, generating with records: `python -m bench.sampling.run [--parts score,...] [--out FILE]`.

Each way of a part runs in a process of its own. Its values are held against dense float64, its memory is the most that
it adds to the process, and the ways take turns in a different order each round; one process computes at a time.
"""

import argparse
import random
import statistics
from pathlib import Path

from bench.harness import THREADS, ResidentPeak, Worker, WorkerError, environment, release_memory, timed, write_line
from bench.sampling.parts import Part, Record


class Subject:
    """A way in its worker."""

    def __init__(self, part: str, way: str, size: str) -> None:
        self.way = parts()[part].ways[way](size)

    def qualify(self) -> tuple[float, float]:
        """(error, MB above the inputs); the second call, so that nothing is made for the first time."""
        error = self.way.error()
        self.way.run()
        release_memory()
        with ResidentPeak() as peak:
            self.way.run()
        return error, peak.above_mb

    def seconds(self) -> tuple[float, float]:
        return timed(self.way.run)


def parts() -> dict[str, Part]:
    """Every part; imported here, so that a part's packages are needed by that part alone."""
    from bench.sampling.decode import PARTS as DECODE
    from bench.sampling.generate import GENERATE, GENERATE_GREEDY
    from bench.sampling.score import SCORE

    return {
        "score": SCORE,
        **DECODE,
        "generate": GENERATE,
        "generate-greedy": GENERATE_GREEDY,
    }


def measure(name: str, size: str, rounds: int) -> Record:
    """The ways of a part: errors, memory, and the rounds of timings."""
    part = parts()[name]
    workers = {way: Worker(Subject, name, way, size) for way in part.ways}
    ways: dict[str, Record] = {way: {"seconds": [], "others": []} for way in part.ways}
    for way, record in ways.items():
        try:
            record["error"], record["peak_mb"] = workers[way].call("qualify")
            wrong = not record["error"] <= part.error_limit
            record["reason"] = f"off by {record['error']:.1e} {part.unit}" if wrong else None
        except WorkerError as error:
            record["reason"] = str(error)
    running = [way for way, record in ways.items() if record["reason"] is None]
    for number in range(rounds):
        for way in random.Random(number).sample(running, len(running)):
            wall, others = workers[way].call("seconds")
            ways[way]["seconds"].append(wall)
            ways[way]["others"].append(round(others, 3))
    for worker in workers.values():
        worker.stop()
    for way in running:
        ways[way]["seconds_median"] = statistics.median(ways[way]["seconds"])
    return {
        "kind": name,
        "title": part.title,
        "size": part.sizes[size],
        "rounds": rounds,
        "ways": ways,
        **_reached(part, ways),
    }


def _reached(part: Part, ways: dict[str, Record]) -> Record:
    """Our time over each other way's, round by round, beside what it should be."""
    ours = next(iter(part.ways))
    ratios = {}
    for way, record in ways.items():
        if way != ours and record["seconds"] and ways[ours]["seconds"]:
            pairs = zip(ways[ours]["seconds"], record["seconds"], strict=True)
            ratios[way] = round(statistics.median(a / b for a, b in pairs), 3)
    return {"ours": ours, "ratios": ratios, "limits": part.limits, "memory_limit_mb": part.memory_limit_mb}


def missed(record: Record) -> list[str]:
    """What a part did not reach, in words."""
    ours = record["ways"][record["ours"]]
    out = [f"{record['kind']}, {way}: {r['reason']}" for way, r in record["ways"].items() if r["reason"]]
    for way, limit in record["limits"].items():
        found = record["ratios"].get(way)
        if found is not None and found > limit:
            out.append(f"{record['kind']}: {found:.2f} × {way}, wanted {limit:.2f}")
    most = record["memory_limit_mb"]
    if most is not None and ours.get("peak_mb", 0.0) > most:
        out.append(f"{record['kind']}: {ours['peak_mb']:.0f} MB, wanted {most:.0f}")
    return out


def table(record: Record) -> str:
    """Markdown."""
    lines = [
        f"**{record['title']}**, {record['size']}",
        "",
        "| way | s | logitless / it | MB | error |",
        "|---|---|---|---|---|",
    ]
    for way, r in record["ways"].items():
        if r["reason"]:
            lines.append(f"| {way} | {r['reason']} |")
            continue
        ratio = record["ratios"].get(way)
        shown = "" if ratio is None else f"{ratio:.2f}"
        lines.append(f"| {way} | {r['seconds_median']:.2f} | {shown} | {r['peak_mb']:.0f} | {r['error']:.0e} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sampling.run", description=__doc__)
    parser.add_argument("--parts", default=",".join(parts()))
    parser.add_argument("--size", default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args(argv)
    here, records = environment(THREADS), []
    for name in options.parts.split(","):
        records.append(measure(name, options.size, options.rounds))
        print(table(records[-1]), flush=True)
        if options.out is not None:  # each with its machine: parts are measured on different days
            write_line(options.out, records[-1] | {"environment": here})
    failed = [line for record in records for line in missed(record)]
    print("\n".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
