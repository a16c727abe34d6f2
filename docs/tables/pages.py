"""Writes each table of the pages and the README, or checks it.

What lies between `<!-- table: NAME -->` and `<!-- end of table -->` on each page is written, so that it is read
wherever the page is. A result file that does not exist gives a line that says so. `--check` writes nothing and exits
with 1 where a page is not what its results say.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.harness import read_lines
from docs.tables import (
    benchmark,
    cpu,
    gpu,
    grade,
    jax,
    logits,
    long_context,
    many_devices,
    peers,
    pooling,
    precision,
    quantised,
    real,
    sampling,
    scaling,
)
from docs.tables.shared import RESULTS

Record = dict[str, Any]
ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

OF_RESULTS: dict[str, tuple[str, Callable[[list[Record]], str]]] = {
    "summary": ("benchmark.jsonl", benchmark.summary),
    "logits": ("logits_table.jsonl", logits.logits),
    "benchmark": ("benchmark.jsonl", benchmark.benchmark),
    "benchmark_fresh": ("benchmark_fresh.jsonl", benchmark.benchmark),
    "train_step": ("train_step.jsonl", cpu.train_step),
    "slices": ("slices.jsonl", cpu.slices),
    "scaling": ("scaling.jsonl", scaling.scaling),
    "precision": ("precision.jsonl", precision.precision),
    "grade": ("grade.jsonl", grade.grade),
    "jax": ("jax.jsonl", jax.in_jax),
    "sampling": ("sampling.jsonl", sampling.sampling),
    "quantised": ("quantised.jsonl", quantised.quantised),
    "pooling": ("pooling.jsonl", pooling.pooling),
    "gemma": ("gemma.jsonl", real.gemma),
    "long_steps": ("long_steps.jsonl", long_context.steps),
    "nsa": ("nsa.jsonl", long_context.sparse),
    "long_run": ("long_run.jsonl", long_context.run),
    "gpu": ("gpu.jsonl", gpu.measured),
    "gpu_others": ("gpu.jsonl", gpu.others),
    "gpu_counts": ("gpu_counts.jsonl", gpu.counts),
}
OF_SEVERAL: dict[str, Callable[[], str]] = {
    "scale": many_devices.scale,
    "peers": peers.peers,
    "processors": benchmark.processors,
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
