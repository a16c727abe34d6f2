"""How a loss grows with the vocabulary, the tokens, the width and the threads: `python -m bench.scaling [--out FILE]`.

One size is varied at a time. Each step is the loss with the gradients of hidden states and weight, or the log-prob and
entropy alone; methods in turn in one process, wall seconds, minima of rounds. `bare` is the fastest order of the matrix
products alone, `chunks` torch's own loss in chunks of 256 tokens. The peak counts what a step allocates beside its
inputs. With --allocator, jemalloc's library, a step may use the memory of the one before. `--png` draws a result file.
"""

import argparse
import math
from pathlib import Path

import torch

from bench.cases import CASES, Shape, make_tensors
from bench.harness import MB, Worker, preloaded, read_lines, results, timed
from bench.peers import METHODS
from tests.support.allocations import peak_new_bytes

LEAST_SECONDS = 0.2  # a timing repeats a shorter call until it takes this long
SWEEPS = {
    "vocab": [Shape(1024, 512, v) for v in (32_768, 65_536, 131_072, 262_144)],
    "tokens": [Shape(n, 512, 32_768) for n in (1, 16, 256, 1024, 4096, 16_384)],
    "hidden": [Shape(1024, h, 32_768) for h in (256, 512, 1024, 2048, 4096)],
}
THREADS = (1, 2)
OF_THREADS = Shape(1024, 512, 65_536)
SHOWN = {
    "bare": (
        "bare GEMMs",
        "bare GEMMs, vocabulary slices",
        "bare GEMMs, vocabulary tiles",
        "bare GEMMs, smaller tiles",
    ),
    "compiled": ("logitless, compiled",),
    "eager": ("logitless",),
    "dense": ("torch",),
    "chunks": ("F.linear_cross_entropy, chunks of 256",),
}
COLOURS = {"bare": "#b6bec9", "compiled": "#1f6feb", "eager": "#54aeff", "dense": "#d1495b", "chunks": "#e0a458"}


def points():
    """(what varies, shape, threads) of every step."""
    for sweep, shapes in SWEEPS.items():
        yield from ((sweep, shape, max(THREADS)) for shape in shapes)
    yield from (("threads", OF_THREADS, threads) for threads in THREADS)


class Point:
    """One shape's tensors and every method's step on them."""

    def __init__(self, name, shape, threads):
        torch.set_num_threads(threads)
        case, of = CASES[name], {method.name: method for method in METHODS[name]}
        tensors = make_tensors(case, shape)
        self.steps, self.peaks = {}, {}
        for shown, names in SHOWN.items():
            for each in names:
                if each in of:
                    own = {key: x.detach() for key, x in tensors.items()}
                    step = self.steps[shown, each] = of[each].build(case, own)
                    step()  # compiles what is compiled
                    self.peaks[shown] = peak_new_bytes(step) / MB

    def measured(self, rounds):
        """Per shown method its seconds and peak, and how much of the machine others kept busy."""
        seconds, busy = dict.fromkeys(self.peaks, math.inf), 0.0
        for _ in range(rounds):
            for (shown, _), step in self.steps.items():
                wall, others = timed(step)
                if wall < LEAST_SECONDS:
                    wall, others = timed(step, math.ceil(LEAST_SECONDS / wall))
                seconds[shown], busy = min(seconds[shown], wall), max(busy, others)
        return {shown: {"seconds": seconds[shown], "peak_mb": peak} for shown, peak in self.peaks.items()}, busy


def measured(allocator, rounds, *point):
    """`Point.measured`, in a process of its own where it has an allocator of its own."""
    if allocator is None:
        return Point(*point).measured(rounds)
    with preloaded(allocator), Worker(Point, *point) as worker:
        return worker.call("measured", rounds)


def draw(records, path):
    """Seconds above, peak memory below, of a loss over each size that is varied."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    labels = {"vocab": "entries of the vocabulary", "tokens": "tokens", "hidden": "width of the hidden state"}
    figure, axes = plt.subplots(2, len(SWEEPS), figsize=(10, 6), sharex="col", layout="constrained")
    for column, (sweep, label) in enumerate(labels.items()):
        rows = [r for r in records if r["kind"] == "scaling" and (r["case"], r["sweep"]) == ("loss", sweep)]
        at = ("tokens", "hidden", "vocab").index(sweep)
        for axis, key, unit in zip(axes[:, column], ("seconds", "peak_mb"), ("seconds", "MB"), strict=True):
            for name in rows[0]["methods"]:
                sizes = [r["shape"][at] for r in rows]
                values = [r["methods"][name][key] for r in rows]
                if key == "seconds" or name not in ("bare", "eager"):  # eager's peaks are compiled's
                    axis.plot(sizes, values, marker="o", markersize=3, color=COLOURS[name], label=name)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axis.yaxis.set_major_formatter("{x:,g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            if column == 0:
                axis.set_ylabel({"seconds": "time of a step, s", "MB": "peak above the inputs, MB"}[unit], fontsize=9)
        axes[1][column].set_xlabel(label, fontsize=9)
        ticks = [r["shape"][at] for r in rows]
        axes[1][column].set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
        fixed = [f"{k}={n:,}" for k, n in zip("NHV", rows[0]["shape"], strict=True) if k != "NHV"[at]]
        axes[0][column].set_title(" ".join(fixed), loc="left", fontsize=9)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=("entropy", "loss"), default=["loss", "entropy"])
    parser.add_argument("--allocator", type=Path, help="a library that keeps freed memory, such as libjemalloc.so.2")
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist, unless to draw")
    parser.add_argument("--png", type=Path, help="draw what --out holds, and measure nothing")
    o = parser.parse_args(arguments)
    if o.png:
        if o.out is None:
            parser.error("--png draws a result file: give it as --out")
        draw(read_lines(o.out), o.png)
        return
    kept = {"allocator": o.allocator.resolve().name} if o.allocator else {}
    write = results(o.out, max(THREADS), freed_memory="kept" if kept else "fresh", rounds=o.rounds, **kept)
    for name in o.cases:
        found = {}  # sweeps share a point
        for sweep, shape, threads in points():
            if (shape, threads) not in found:
                found[shape, threads] = measured(o.allocator, o.rounds, name, shape, threads)
            methods, busy = found[shape, threads]
            sizes = [shape.tokens, shape.hidden, shape.vocab]
            told = ", ".join(f"{k} {m['seconds']:.3f} s {m['peak_mb']:,.0f} MB" for k, m in methods.items())
            print(f"{name}, {sweep}: {sizes}, {threads} threads, others {busy:.0%}: {told}", flush=True)
            row = {"kind": "scaling", "case": name, "sweep": sweep, "shape": sizes, "threads": threads}
            write(row | {"others": round(busy, 3), "methods": methods})


if __name__ == "__main__":
    main()
