"""Which slices a CPU computes fastest: `python -m bench.cpu.slices [--out FILE]`.

Log-prob and entropy over tiles of so many tokens and logits, a loss with its gradients over so many tokens' whole rows
and so many entries at a time. All sizes in turn in one process, wall seconds, minima of rounds; the sizes that the pass
takes are those of `algebra/costs.py`.
"""

import argparse
import math
from itertools import product
from pathlib import Path

import torch

from bench.cases import CASES, Shape, make_tensors
from bench.harness import THREADS, results, timed
from bench.peers import logitless
from logitless.algebra import costs

SHAPE = Shape(4096, 512, 32_768)
WORKS = {  # constants of `costs`, and their values
    "entropy": {
        "STREAM_TOKENS": [{"cpu": n} for n in (512, 1024, 2048, 4096)],
        "CPU_TILE": [1 << p for p in (18, 19, 20, 21)],
    },
    "loss": {
        "CPU_WHOLE_ROWS": [(n, n) for n in (128, 256, 512, 1024, 2048)],
        "WHOLE_WIDTH": (512, 1024, 2048, 4096, 8192),
    },
}


def caches():
    """Bytes of the processor's caches by level, as the system says them."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found


def size_now(name):
    """(tokens, and the logits of a tile or the entries at a time) of a work by the constants as they are."""
    if name == "entropy":
        return costs.STREAM_TOKENS["cpu"], costs.CPU_TILE
    return costs.cpu_rows(SHAPE.vocab, costs.DEFAULT_BUDGET // 4), costs.WHOLE_WIDTH


def measured(name, rounds):
    """Records of one work's sizes, and which of them are the pass's own."""
    before = {constant: getattr(costs, constant) for constant in WORKS[name]}
    own, step = size_now(name), logitless(CASES[name], make_tensors(CASES[name], SHAPE))
    least, busy = {}, 0.0
    for _ in range(rounds):
        for values in product(*WORKS[name].values()):
            for constant, value in zip(before, values, strict=True):
                setattr(costs, constant, value)
            wall, others = timed(step)
            size = size_now(name)
            least[size], busy = min(least.get(size, math.inf), wall), max(busy, others)
    for constant, value in before.items():
        setattr(costs, constant, value)
    about = {"kind": "slices", "case": name, "own": own, "others": round(busy, 3)}
    return [about | {"size": size, "seconds": seconds} for size, seconds in least.items()]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    write = results(o.out, caches=caches(), shape=[SHAPE.tokens, SHAPE.hidden, SHAPE.vocab])
    for name in WORKS:
        for r in measured(name, o.rounds):
            write(r)
            mark = " (the pass's own)" if r["size"] == r["own"] else ""
            print(f"{name}: {' x '.join(map(str, r['size']))}: {r['seconds']:.3f} s{mark}", flush=True)


if __name__ == "__main__":
    main()
