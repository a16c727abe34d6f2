"""What a slice's operations cost by where two cores lie: `python -m bench.cpu.cores [--out FILE]`.

Two cores that share a cache hand a line of memory to and fro in some 60 ns, two that do not in some 300, and a virtual
machine's move between one and the other within seconds. Each round is measured between two looks at that time, and
counts where both say the same. The operations are a loss's on logits in columns, with two threads, one slice after the
other: its maxima, its sums and the product that adds up over entries are shared out as torch does it, and by entries,
as docs/decisions/0041 says. Microseconds of a slice, the median of the rounds.
"""

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import median

import torch

from bench.harness import THREADS, environment, write_line
from logitless.algebra.costs import WHOLE_WIDTH
from logitless.vocab.backends.eager import threads
from logitless.vocab.backends.logits import add_product

TOKENS, HIDDEN, VOCAB = 256, 512, 131_072
TURNS = 100_000
PLACES = "near", "far"
FAR = 150  # ns, between what two cores take that share a cache and two that do not


@cache
def _library():
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).with_suffix(".c"), Path(folder, "cores.so")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
        found = ctypes.CDLL(str(library))
    found.round_trip.restype, found.round_trip.argtypes = ctypes.c_double, [ctypes.c_long]
    return found


def round_trip():
    """ns in which a line of memory goes from the first core to the second and back; 0 where there is no second."""
    return 0.0 if os.cpu_count() == 1 else _library().round_trip(TURNS)


def place(before, after):
    """Which of `PLACES` the cores were in between two such looks; None where they were moved meanwhile."""
    return PLACES[before > FAR] if (before > FAR) == (after > FAR) else None


def operations(shared, tokens, entries, hidden, number):
    """A loss's operations on slice i of `number`, by their names; shared: as the pass has them, else as torch does."""
    states, weight = torch.randn(tokens, hidden), torch.randn(number * entries, hidden) / 10
    slices = [torch.empty(entries, tokens).t() for _ in range(number)]
    gradient = torch.zeros(tokens, hidden)
    into = threads.shares_of(gradient, entries) if shared else gradient
    maxima, sums = (threads.maxima, threads.sums) if shared else (lambda z: z.amax(1), lambda z: z.sum(1))
    peak = torch.zeros(tokens, 1)

    def rows(i):
        return weight[i * entries : (i + 1) * entries]

    return {
        "logits": lambda i: torch.mm(states, rows(i).t(), out=slices[i]),
        "maxima": lambda i: peak.copy_(maxima(slices[i])[:, None]),
        "less the maximum": lambda i: slices[i].sub_(peak),
        "exp2": lambda i: slices[i].exp2_(),
        "sums": lambda i: sums(slices[i]),
        "gradient of hidden": lambda i: add_product(slices[i], rows(i), into),
    }


def microseconds(known, number):
    """The mean time of each operation, one slice after the other."""
    seconds = dict.fromkeys(known, 0.0)
    for i in range(number):
        for name, operation in known.items():
            start = time.perf_counter()
            operation(i)
            seconds[name] += time.perf_counter() - start
    return {name: 1e6 * x / number for name, x in seconds.items()}


def measured(rounds, number=VOCAB // WHOLE_WIDTH, shape=(TOKENS, WHOLE_WIDTH, HIDDEN)):
    """{(shared, place): {operation: [microseconds of each round, ...], ...}}"""
    ways = {shared: operations(shared, *shape, number) for shared in (False, True)}
    found = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for shared, known in ways.items():
            before, times, after = round_trip(), microseconds(known, number), round_trip()
            if where := place(before, after):
                for name, x in times.items():
                    found[shared, where][name].append(x)
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    o = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    env = environment()
    for (shared, where), known in sorted(measured(o.rounds).items()):
        middle = {name: median(x) for name, x in known.items()}
        print(f"{'each its entries' if shared else 'as torch shares out'}, {where} cores:", end=" ")
        print(*(f"{name} {x:.0f}" for name, x in middle.items()), f"together {sum(middle.values()):.0f} µs", sep=", ")
        if o.out:
            about = {"kind": "cores", "shared": shared, "far": where == "far", "rounds": len(known["logits"])}
            write_line(o.out, env | about | {"microseconds": middle})


if __name__ == "__main__":
    main()
