"""CPU seconds of ours and of the bare products, in turn in one process: `python -m bench.in_turn [--cases entropy]`.

For machines that others use too: processor seconds of this process leave out what it waited for, and the least of many
rounds what others took from its caches. Gives the ratio to the fastest bare product, by where the cores lay, too, as
`bench.cpu.cores` finds it before and after each call, and each first call's seconds, its compiler's included: those of
a cold cache where TORCHINDUCTOR_CACHE_DIR names an empty folder. `--peers` adds others' methods by the beginnings of
their names. Preload jemalloc, as docs/how-to/cpu.md says, for memory that is kept.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.cases import CASES, SHAPES, Case, Shape, make_tensors
from bench.cpu.cores import PLACES, place, round_trip
from bench.harness import environment, write_line
from bench.peers import Method, chosen


def cpu_seconds() -> float:
    """Of this process and of those that it has run."""
    return sum(os.times()[:4])


def least_seconds(case: Case, shape: Shape, methods: Sequence[Method], rounds: int) -> dict[str, dict[str, float]]:
    """Per method: the CPU seconds of the first call, and the least of a call, of all and by where the cores lay."""
    tensors = make_tensors(case, shape)
    # the same memory for each
    steps = {m.name: m.build(case, {name: x.detach() for name, x in tensors.items()}) for m in methods}
    found = {}
    for method, step in steps.items():
        own = cpu_seconds()
        step()
        found[method] = {"first_s": cpu_seconds() - own}
    for _ in range(rounds):
        for method, step in steps.items():
            before, own = round_trip(), time.process_time()
            step()
            own = time.process_time() - own
            for kept in filter(None, ("least", place(before, round_trip()))):
                found[method][f"{kept}_s"] = min(found[method].get(f"{kept}_s", own), own)
    for kept in ("least", *PLACES):
        floors = [found[m.name][f"{kept}_s"] for m in methods if m.kind == "floor" and f"{kept}_s" in found[m.name]]
        for seconds in found.values():
            if floors and f"{kept}_s" in seconds:
                seconds["to_bare" if kept == "least" else f"{kept}_to_bare"] = seconds[f"{kept}_s"] / min(floors)
    return found


def described(seconds: dict[str, float]) -> str:
    ratios = [f"{seconds['to_bare']:.3f} x bare"]
    ratios += [f"{where} {seconds[f'{where}_to_bare']:.3f}" for where in PLACES if f"{where}_to_bare" in seconds]
    return f"{seconds['least_s']:.3f} s, {', '.join(ratios)}, first {seconds['first_s']:.1f} s"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.in_turn", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated, of: %(default)s")
    parser.add_argument("--peers", default="", help="comma-separated beginnings of others' names, to measure them too")
    parser.add_argument("--shape", help="tokens,hidden,vocabulary instead of 2048,512,131072")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args(arguments)
    peers = options.peers.split(",") if options.peers else ()
    try:
        options.methods = chosen(options.cases.split(","), peers, ("ours", "floor"))
    except ValueError as error:
        parser.error(str(error))
    options.shape = Shape(*map(int, options.shape.split(","))) if options.shape else SHAPES["full"]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    env = environment()
    for name, methods in options.methods.items():
        load = os.getloadavg()[0]
        found = least_seconds(CASES[name], options.shape, methods, options.rounds)
        print(f"{name}: {options.shape}, {options.threads} threads, load {load:.1f}", flush=True)
        for method, s in sorted(found.items(), key=lambda item: item[1]["least_s"]):
            print(f"{method:>40}  {described(s)}", flush=True)
        if options.out:
            s = options.shape
            about = {"kind": "in turn", "case": name, "shape": [s.tokens, s.hidden, s.vocab]}
            measured = {"load": load, "rounds": options.rounds, "methods": found}
            write_line(options.out, env | about | measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
