"""The benchmark: every method of each piece of work, and the summaries."""

from typing import Any

from bench.harness import read_lines
from bench.plot import caption, full_table, summary_table
from docs.tables.shared import RESULTS

Record = dict[str, Any]


def benchmark(records: list[Record]) -> str:
    return f"{caption(records)}.\n\n{full_table(records)}"


def processors() -> str:
    """The summary of each further processor that was measured."""
    found = [read_lines(path) for path in sorted(RESULTS.glob("benchmark_on_*.jsonl"))]
    return "\n\n".join(f"{caption(records)}.\n\n{summary_table(records)}" for records in found)


def summary(records: list[Record]) -> str:
    return f"{summary_table(records)}\n\n{caption(records)}."
