"""Tables of the docs and the README from result files: `python -m docs.tables [--check]`.

Writes what lies between `<!-- table: NAME -->` and `<!-- end of table -->` on each page, so that it is read wherever
the page is. A result file that does not exist gives a line that says so. `--check` writes nothing and exits with 1
where a page is not what its results say.
"""

import argparse
import operator
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.harness import read_lines
from bench.plot import caption, full_table, summary_table
from bench.sampling.run import table as sampling_table
from docs import gpu_tables, long_tables
from docs.grade_tables import grade
from docs.markdown import grid
from docs.peers_table import peers
from docs.scale_tables import scale
from docs.scaling_tables import scaling

Record = dict[str, Any]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def machine(records: list[Record]) -> str:
    env = records[0]
    threads = f"{env['threads']} thread{'s' * (env['threads'] != 1)}"
    return f"{env['cpu']}, {threads}, torch {env['versions']['torch']}, {env['date'][:10]}."


def logits(records: list[Record]) -> str:
    """Time and memory of log-probs from logits that exist, times the dense method, a table for each dtype."""
    batch, length, vocab = records[0]["shape"]
    found = [r for r in records[1:] if r["status"] == "ok"]
    parts = []
    for dtype in dict.fromkeys(r["dtype"] for r in found):
        some = [r for r in found if r["dtype"] == dtype]
        dense = next((r for r in some if r["method"] == "dense"), some[0])
        copy = batch * length * vocab * (2 if dtype == "bf16" else 4) / 1e6
        title = f"**{dtype} logits**, B={batch}, L={length:,}, V={vocab:,}: {copy:,.0f} MB"
        parts.append(title + "\n\n" + grid(_LOGITS_HEAD, [_logits_row(r, dense) for r in some]))
    return "\n\n".join(
        [*parts, _guidance(found), f"{machine(records)} Memory is above the logits themselves."]
    )


_LOGITS_HEAD = [
    "method",
    "forward",
    "× dense",
    "with backward",
    "× dense",
    "forward peak",
    "kept for backward",
    "peak with backward",
    "error (nat)",
]


def _logits_row(r: Record, dense: Record) -> list[str]:
    cells = [r["method"]]
    for key in ("forward_s_median", "step_s_median"):
        cells += [f"{r[key]:.2f} s", f"{r[key] / dense[key]:.2f}"]
    cells += [f"{r[key]:,.0f} MB" for key in ("forward_peak_mb", "kept_mb", "step_peak_mb")]
    return [*cells, f"{r['value_error']:.0e}"]


def _guidance(found: list[Record]) -> str:
    """Which of ours was best at what, from the same records."""
    lines = []
    for dtype in dict.fromkeys(r["dtype"] for r in found):
        ours = [r for r in found if r["dtype"] == dtype and not r["method"].startswith("tutorial")]
        keys = ("forward_s_median", "step_s_median", "forward_peak_mb", "step_peak_mb")
        best = [f"`{min(ours, key=operator.itemgetter(key))['method']}`" for key in keys]
        lines.append(
            f"- {dtype}: fastest without gradient {best[0]}, with backward {best[1]}; "
            f"least memory without gradient {best[2]}, with backward {best[3]}."
        )
    return "\n".join(lines)


def benchmark(records: list[Record]) -> str:
    return f"{caption(records)}.\n\n{full_table(records)}"


def processors() -> str:
    """The summary of each further processor that was measured."""
    found = [read_lines(path) for path in sorted(RESULTS.glob("benchmark_on_*.jsonl"))]
    return "\n\n".join(f"{caption(records)}.\n\n{summary_table(records)}" for records in found)


def summary(records: list[Record]) -> str:
    return f"{summary_table(records)}\n\n{caption(records)}."


def precision(records: list[Record]) -> str:
    """Errors against float64: the pass beside whole logits with a float32 log-softmax."""
    of: dict[str, list[Record]] = {}
    for r in records[1:]:
        of.setdefault(r["kind"], []).append(r)
    tokens, hidden, vocab = records[0]["shape"]
    numbers = {(r["name"], r["dtype"]): r for r in of["statistic"]}
    names = list(dict.fromkeys(r["name"] for r in of["statistic"]))
    keys = [(dtype, key) for dtype in ("fp32", "bf16") for key in ("error", "plain_error")]
    values = [[f"`{n}`", *(f"{numbers[n, d][k]:.0e}" for d, k in keys)] for n in names]
    slopes = {(r["name"], r["dtype"]): r for r in of["gradient"]}
    keys = [(dtype, key) for dtype in ("fp32", "bf16") for key in ("relative", "plain_relative")]
    grads = [
        [f"gradient of {n}", *(f"{slopes[n, d][k]:.0e}" for d, k in keys)]
        for n in ("hidden", "weight")
    ]
    both = ["fp32: the pass", "fp32: whole logits", "bf16: the pass", "bf16: whole logits"]
    sure = [
        [f"{r['margin']:g}", *(f"{r[k]:.0e}" for k in ("loss", "relative", "plain_relative"))]
        for r in of["margin"]
    ]
    near = [
        [f"{r[k]:.0e}" for k in ("kl", "relative", "plain_relative", "moments_relative")]
        for r in of["kl"]
    ]
    return "\n\n".join(
        [
            "Largest error of a token in nats (of `sum_sq_prob`, `el2n`, `acceptance` and `total_variation` in "
            f"probability), N={tokens}, H={hidden}, V={vocab:,}:",
            grid(["statistic", *both], values),
            "Gradients of log-prob and entropy under a random cotangent, norm of the error over norm of the gradient:",
            grid(["", *both], grads),
            "A sure token, float32: relative error of its loss, the label leading all others together by a margin:",
            grid(["margin (nat)", "loss", "the pass", "`F.cross_entropy`"], sure),
            "KL to a reference, float32: largest relative error of a token:",
            grid(
                [
                    "KL (median)",
                    "the pass",
                    "Σ p·(log p - log q)",
                    "two moments and two log-sum-exps",
                ],
                near,
            ),
            machine(records),
        ]
    )


def in_jax(records: list[Record]) -> str:
    """Seconds and XLA's own account of temporaries, ours beside dense, of each work."""
    head = ["work", "method", "time", "× dense", "× bare", "temporaries"]
    of = {(r["work"], r["method"]): r for r in records[1:]}
    rows = []
    for (work, method), r in of.items():
        ratio = r["seconds"] / of[work, "dense"]["seconds"]
        bare = of.get((work, "bare products"))
        rows.append(
            [
                work,
                method,
                f"{1e3 * r['seconds']:,.0f} ms",
                f"{ratio:.2f}",
                f"{r['seconds'] / bare['seconds']:.2f}" if bare else "",
                f"{r['temporaries_mb']:,.0f} MB",
            ]
        )
    env, sizes = records[0], records[0]["sizes"]
    where = f"{env['cpu']}, {env['cores']} cores, jax {env['versions']['jax']}, {env['date'][:10]}"
    what = "N={tokens:,}, steps of {step}, H={hidden}, V={vocab:,}, {keep} best entries".format(
        **sizes
    )
    return f"{grid(head, rows)}\n\n{what}; {where}: `python -m bench.jax_loss`."


def sampling(records: list[Record]) -> str:
    """A table for each part, the last one measured, with its machine and day."""
    latest = {r["kind"]: r for r in records}
    return "\n\n".join(f"{sampling_table(r)}\n\n{_quiet(r)}" for r in latest.values())


def _quiet(r: Record) -> str:
    """The machine, and how much of it others took."""
    busy = max(
        (max(way["others"]) for way in r["ways"].values() if way.get("others")), default=None
    )
    others = "" if busy is None else f" Other processes took up to {busy:.0%} of it."
    return machine([r["environment"]]) + others


def quantised(records: list[Record]) -> str:
    """The bytes of each head, and processor seconds of each kind of work with their ratio to the fp32 head's."""
    parts = []
    for shape in dict.fromkeys(r["shape"] for r in records[1:]):
        some = [r for r in records[1:] if r["shape"] == shape]
        works = list(dict.fromkeys(r["work"] for r in some))
        rows = []
        for head in dict.fromkeys(r["head"] for r in some):
            found = {r["work"]: r for r in some if r["head"] == head}
            cells = [
                f"{found[work]['seconds']:.3f} s ({found[work]['ratio']:.2f} ×)" for work in works
            ]
            rows.append([head, f"{found[works[0]]['head_bytes'] / 1e6:,.1f} MB", *cells])
        title = f"**{shape}**, V={some[0]['vocabulary']:,}, H={some[0]['hidden']:,}"
        columns = [
            f"{work}, {next(r['tokens'] for r in some if r['work'] == work):,} tokens"
            for work in works
        ]
        parts.append(f"{title}\n\n{grid(['head', 'bytes', *columns], rows)}")
    return "\n\n".join([*parts, f"{machine(records)} Processor time, the least of the rounds."])


def pooling(records: list[Record]) -> str:
    """Processor time of each way to a maximum over tokens, its peak, and how many documents a memory holds."""
    head = ["active pairs", "way", "time", "products", "× dense", "peak", "documents in 24 GiB"]
    parts = []
    for vocabulary in dict.fromkeys(r["vocabulary"] for r in records[1:]):
        some = [r for r in records[1:] if r["vocabulary"] == vocabulary]
        rows = [
            [
                f"{r['active']:.1%}",
                r["method"],
                f"{r['cpu_seconds']:.2f} s",
                f"{r['to_bare']:.2f}",
                f"{r['to_dense']:.2f}",
                f"{r['peak_mib']:,.0f} MiB",
                f"{r['documents_in_24_gib']:,}",
            ]
            for r in some
        ]
        sizes = "V={vocabulary:,}, H={hidden}, {documents} documents of {length} tokens".format(
            **some[0]
        )
        parts.append(f"**{sizes}**\n\n{grid(head, rows)}")
    busy = max(r["others_busy"] for r in records[1:])
    return "\n\n".join(
        [
            *parts,
            "A training step of the head alone in fp32, `products` in bare products of the forward pass. "
            f"{machine(records)} Processor time, the least of the rounds, while others kept up to {busy:.0%} of the "
            f"machine busy (load {records[0]['load']:.1f}).",
        ]
    )


def train_step(records: list[Record]) -> str:
    """Seconds of a whole step by each method, with the last ones measured of new and of kept memory."""
    last = {r["freed_memory"]: r for r in records}
    rows = []
    for memory, of in {
        "new at each step": last["fresh"],
        "of the step before": last["kept"],
    }.items():
        for method, seconds in of["seconds"].items():
            ratio = statistics.median(
                a / b for a, b in zip(seconds, of["seconds"]["dense"], strict=True)
            )
            spread = f"{statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"
            rows.append([memory, method, spread, f"{ratio:.2f}"])
    kept = last["kept"]
    shape = "{tokens:,} tokens, V={vocabulary:,}, H={hidden:,}".format(**kept["shape"])
    busy = max(r["others"] for r in last.values())
    return (
        f"{grid(['memory', 'loss', 'a step', '× dense'], rows)}\n\n{shape}; medians of "
        f"{len(kept['seconds']['dense'])} rounds in turn. {machine([kept])} Other processes took up to {busy:.0%} "
        "of the machine."
    )


def slices(records: list[Record]) -> str:
    """Times of sizes of slices over those of the pass's own, a grid for each piece of work."""
    env, rows = records[0], records[1:]
    parts = []
    for case, title in (("entropy", "Log-prob and entropy"), ("loss", "Loss and gradients")):
        of = {tuple(r["size"]): r for r in rows if r["case"] == case}
        own = tuple(next(iter(of.values()))["own"])
        across = list(dict.fromkeys(b for _, b in of))
        cells = [
            [
                f"{a:,}",
                *(_bold(of[a, b]["seconds"] / of[own]["seconds"], (a, b) == own) for b in across),
            ]
            for a in dict.fromkeys(a for a, _ in of)
        ]
        what = {"entropy": "logits of a tile", "loss": "entries at a time of whole rows"}[case]
        parts.append(
            f"**{title}**\n\n{grid([f'tokens; {what}', *(f'{b:,}' for b in across)], cells)}"
        )
    shape = "N={:,} H={:,} V={:,}".format(*env["shape"])
    held = ", ".join(f"{level} {size}" for level, size in env["caches"].items())
    busy = max(r["others"] for r in rows)
    return "\n\n".join(
        [
            *parts,
            f"{shape}, caches {held}. {machine(records)} Other processes took up to {busy:.0%} of the machine.",
        ]
    )


def _bold(ratio: float, own: bool) -> str:
    return f"**{ratio:.2f}**" if own else f"{ratio:.2f}"


OF_RESULTS: dict[str, tuple[str, Callable[[list[Record]], str]]] = {
    "summary": ("benchmark.jsonl", summary),
    "logits": ("logits_table.jsonl", logits),
    "benchmark": ("benchmark.jsonl", benchmark),
    "benchmark_fresh": ("benchmark_fresh.jsonl", benchmark),
    "train_step": ("train_step.jsonl", train_step),
    "slices": ("slices.jsonl", slices),
    "scaling": ("scaling.jsonl", scaling),
    "precision": ("precision.jsonl", precision),
    "grade": ("grade.jsonl", grade),
    "jax": ("jax.jsonl", in_jax),
    "sampling": ("sampling.jsonl", sampling),
    "quantised": ("quantised.jsonl", quantised),
    "pooling": ("pooling.jsonl", pooling),
    "long_steps": ("long_steps.jsonl", long_tables.steps),
    "nsa": ("nsa.jsonl", long_tables.sparse),
    "long_run": ("long_run.jsonl", long_tables.run),
    "gpu": ("gpu.jsonl", gpu_tables.measured),
    "gpu_others": ("gpu.jsonl", gpu_tables.others),
    "gpu_counts": ("gpu_counts.jsonl", gpu_tables.counts),
}
OF_SEVERAL: dict[str, Callable[[], str]] = {
    "scale": scale,
    "peers": peers,
    "processors": processors,
}


def table(name: str) -> str:
    """A table as the result files give it."""
    if name in OF_SEVERAL:
        return OF_SEVERAL[name]()
    file, make = OF_RESULTS[name]
    path = RESULTS / file
    if not path.is_file():
        return f"Not measured in this version: `bench/results/{file}` does not exist yet."
    return make(read_lines(path))


def wanted() -> Iterator[tuple[Path, str]]:
    """Every page, with the tables that the result files give."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text("utf-8")
        yield page, MARKED.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.tables", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 where a page is out of date"
    )
    check, status = parser.parse_args(argv).check, 0
    for page, text in wanted():
        if page.read_text("utf-8") == text:
            continue
        print(
            f"{page.relative_to(ROOT)}: {'out of date, run python -m docs.tables' if check else 'written'}"
        )
        status = int(check)
        if not check:
            page.write_text(text, "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
