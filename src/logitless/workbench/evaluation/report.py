"""The end of an evaluation: what the rows and documents that it wrote come to, as numbers, a table and curves."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from ...units import format_perplexity, perplexity, plural
from ..common.files import arrow_file
from ..common.tables import WholeTable
from ..scoring.summary import measured_rows, rows_of, show_rows
from .curves import ByContext, Calibration, Spectrum
from .measure import DIVERGENCES

GROUPS = 10  # of as many tokens each, in the curves against correctness
QUANTILES = (0.5, 0.9, 0.99, 1.0)
MOST_LISTED = 10  # documents that a summary names
AGAINST_CORRECTNESS = ("entropy", "self_certainty")


def curves(tokens: Path, bins: int) -> dict[str, Any]:
    """What the rows of tokens.parquet come to, read a row group at a time."""
    calibration, context = Calibration(bins), ByContext()
    spectra = {name: Spectrum() for name in (*AGAINST_CORRECTNESS, *DIVERGENCES)}
    for rows in _row_groups(tokens):
        correct = rows["rank"] == 1
        calibration.add(rows["confidence"], correct)
        context.add(rows["context"], rows["logprob"], correct)
        for name in spectra.keys() & rows.keys():
            shown = np.isfinite(rows[name]) | (name in DIVERGENCES)  # whose quantiles may be infinite, as no axis may
            spectra[name].add(rows[name][shown], correct[shown])
    against = {name: spectra[name] for name in AGAINST_CORRECTNESS}
    found = {
        "calibration": calibration.summary(),
        "against_correctness": {
            name: {"auroc": x.auroc(), **x.means(), "groups": x.groups(GROUPS)} for name, x in against.items()
        },
        "by_context": context.summary(),
    }
    if spectra["kl"].count.any():
        found["divergences"] = {
            name: {f"{share:g}": spectra[name].quantile(share) for share in QUANTILES} for name in DIVERGENCES
        }
    return found


def _row_groups(tokens: Path) -> Iterator[dict[str, np.ndarray]]:
    """The rows that have a score, by column."""
    with pq.ParquetFile(arrow_file(tokens)) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
            scored = table["logprob"].is_valid().to_numpy()
            if scored.any():
                yield {n: table[n].to_numpy(zero_copy_only=False)[scored].copy() for n in table.column_names}


def by_document(lines: Path) -> dict[str, Any]:
    """Perplexities of documents: their quantiles, and the documents with the highest."""
    nats: list[float] = []

    def scored() -> Iterator[dict[str, Any]]:
        with lines.open(encoding="utf-8") as file:
            for record in map(json.loads, file):
                if record["scored_tokens"]:
                    nats.append(record["nats_per_token"])
                    yield record

    highest = heapq.nlargest(MOST_LISTED, scored(), key=lambda record: record["nats_per_token"])
    counts, edges = np.histogram(nats, bins=min(30, max(1, len(nats))))
    return {
        "perplexity": {f"{q:g}": perplexity(float(np.quantile(nats, q))) for q in (0.1, 0.5, 0.9)},
        "nats_per_token": {"edges": edges.tolist(), "documents": counts.tolist()},
        "highest": highest,
    }


def scored_documents(summary: dict[str, Any]) -> int:
    """How many documents have a score: those that were skipped have none, nor has one of a single token."""
    return sum(summary["by_document"]["nats_per_token"]["documents"])


def table_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the table, without what the run took."""
    rows = rows_of(summary)
    quantiles = summary["by_document"]["perplexity"]
    low, middle, high = (format_perplexity(quantiles[share]) for share in ("0.1", "0.5", "0.9"))
    ranks = ", ".join(f"{x:.2%} in the best {k}" for k, x in summary["top_k_accuracy"].items())
    bins, error = summary["options"]["bins"], summary["calibration"]["expected_calibration_error"]
    by_documents = ("by document", f"perplexity {middle} in the median, {low} to {high} in eight of ten")
    rows += [
        *([by_documents] if scored_documents(summary) > 1 else []),
        ("accuracy", f"{summary['accuracy']:.2%}{f'; {ranks}' if ranks else ''}"),
        ("calibration error", f"{error:.4f}, expected, in {plural(bins, 'interval')} of confidence"),
    ]
    for name, found in summary["against_correctness"].items():
        sides = " where wrong, ".join(_number(found[f"mean_where_{side}"]) for side in ("wrong", "right"))
        rows.append((name.replace("_", "-"), f"{summary[name]:.4f} nats; {sides} where right"))
    return rows + (_compared_rows(summary) if "compared" in summary else [])


def _compared_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    compared, spread = summary["compared"], summary["divergences"]
    theirs, times = format_perplexity(compared["perplexity"]), ratio_value(compared["perplexity_ratio"])
    ratio = f"{theirs}, ours is {times} times that"
    rows = [(f"against {summary['options']['against']}", f"perplexity {ratio}")]
    for name, title in zip(DIVERGENCES, ("KL", "reverse KL", "JSD"), strict=True):
        middle, most = spread[name]["0.99"], spread[name]["1"]
        rows.append((title, f"{_number(compared[name])} nats; 99 % of tokens up to {middle:.3g}, at most {most:.3g}"))
    return [*rows, ("same best entry", f"{compared['agreement']:.3%} of tokens")]


def _number(x: float | None) -> str:
    return "none" if x is None else f"{x:.4g}"


def show(summary: dict[str, Any], console: Console) -> None:
    """The summary as a table."""
    written = ("written", f"{summary['out']}: open page.html")
    if "tasks" in summary:
        console.print(_table_of_tasks(summary["tasks"]), highlight=False)
        return show_rows(console, [*rows_of_tasks(summary), written], [])
    show_rows(console, [*table_rows(summary), *measured_rows(summary), written], summary["skipped_documents"])


def rows_of_tasks(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What a run of tasks took, and what its model did not see."""
    rows = measured_rows(summary)
    if cut := summary["cut_requests"]:
        seen = f"longer than the {plural(summary['longest'], 'token')} that the model sees, cut on their left"
        rows.append(("cut", f"{cut:,} of {plural(summary['requests'], 'request')}: {seen}"))
    return rows


def metrics_of(found: dict[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """(name, value, standard error) of each metric of a task, the calibration error last."""
    for name, x in found["metrics"].items():
        yield name, x["value"], x["standard_error"]
    if certainty := found["certainty"]:
        yield "calibration error", certainty["expected_calibration_error"], None


def metric_value(value: float) -> str:
    """A metric's value, a perplexity of any size too."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def ratio_value(ratio: float) -> str:
    """A ratio of perplexities, with digits that tell one near 1 from 1."""
    return f"{ratio:.6g}"


def _table_of_tasks(tasks: dict[str, Any]) -> Table:
    table = WholeTable(box=None, padding=(0, 2, 0, 0))
    table.add_column("task", overflow="fold")
    for name in ("documents", "metric", "value", "standard error"):
        number = name != "metric"
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for task, found in tasks.items():
        for metric, value, deviation in metrics_of(found):
            error = "" if deviation is None else f"{deviation:.4f}"
            table.add_row(task, f"{found['documents']:,}", metric, metric_value(value), error)
    return table
