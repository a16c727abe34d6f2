"""The end of an alignment run: numbers, a table over the steps, and align.png."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console

from ...printable import on_one_line
from ...units import format_parameters, one_unit, plural
from ..common.plots import DENSE, GREY, LOGITLESS, finish
from ..common.tables import WholeTable
from ..runs import examples
from .config import METHODS

SCHEMA = 1
TABLE_ROWS = 8
SMOOTH = 5
# (metric, its name for people, format, panel of the plot)
ROLLOUTS = (
    ("reward", "reward", "{:z.3f}", True),
    ("self_certainty/mean", "self-certainty", "{:z.3f}", True),
    ("kl", "KL", "{:z.4f}", True),
    ("rewards/repetition_guard/mean", "repetition", "{:z.3f}", False),
    ("rewards/python_lines/mean", "Python lines", "{:z.3f}", False),
    ("entropy", "entropy", "{:z.2f}", False),
    ("completions/mean_length", "tokens", "{:z.1f}", False),
)
PAIRS = (
    ("loss", "loss", "{:z.4f}", True),
    ("rewards/accuracies", "accuracy", "{:z.2f}", True),
    ("rewards/margins", "margin", "{:z.3g}", True),  # β times log-ratios: of any size
    ("rewards/chosen", "chosen", "{:z.3g}", False),
    ("rewards/rejected", "rejected", "{:z.3g}", False),
)
UNITS = {"self_certainty/mean": "nats", "kl": "nats per token", "loss": "nats", "rewards/accuracies": "share of pairs"}


def columns_of(method: str, records: Iterable[dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
    """The metrics of a method that its records have."""
    found = set().union(*records)
    return [row for row in (ROLLOUTS if METHODS[method].rollouts else PAIRS) if row[0] in found]


def numbers(method: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last stretch of each metric, held-out rows before and after, time and memory, from metrics.jsonl."""
    steps = steps_of(records)
    held = [record for record in records if "held_out" in record]
    names = [name for name, *_ in columns_of(method, steps)]
    ends = stretches(steps)[0], stretches(steps)[-1]
    return {
        "steps": steps[-1]["step"],
        "training_seconds": steps[-1]["seconds"],
        "tokens": steps[-1]["tokens"],
        "first": {name: _mean(ends[0], name) for name in names},
        "last": {name: _mean(ends[1], name) for name in names},
        "held_out_before": held[0]["held_out"] if held and held[0]["step"] == 0 else None,
        "held_out_after": held[-1]["held_out"],
        "peak_memory_bytes": max(record["peak_memory_bytes"] for record in steps),
        "dense_would_need_bytes": max(record["memory/dense_would_need_bytes"] for record in steps),
    }


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if "loss" in record]


def stretches(steps: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The steps in at most TABLE_ROWS stretches of about the same length."""
    count = min(TABLE_ROWS, len(steps))
    cuts = [round(i * len(steps) / count) for i in range(count + 1)]
    return [steps[a:b] for a, b in pairwise(cuts)]


def _mean(records: list[dict[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return fmean(values) if values else None


def show(summary: dict[str, Any], records: list[dict[str, Any]], console: Console) -> None:
    """The steps as a table, then what held-out rows, time and memory came to."""
    method, steps = summary["method"], steps_of(records)
    columns = columns_of(method, steps)
    table = WholeTable(box=None, padding=(0, 2, 0, 0))
    for name in ("steps", *(title for _, title, _, _ in columns)):
        table.add_column(name, justify="right", no_wrap=True)
    for part in stretches(steps):
        first, last = part[0]["step"], part[-1]["step"]
        row = [f"{first}-{last}" if first != last else f"{first}"]
        for name, _, form, _ in columns:
            value = _mean(part, name)
            row.append("" if value is None else form.format(value))
        table.add_row(*row)
    console.print()
    steps = plural(summary["steps"], "step")
    title = f"{method} on {on_one_line(summary['model'])}: {format_parameters(summary['parameters'])}, {steps}"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(table, highlight=False)
    examples.show(Path(summary["output_dir"]), console)
    for line in _lines(summary, columns):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _lines(summary: dict[str, Any], columns: list[tuple[str, str, str, bool]]) -> Iterable[str]:
    before, after = summary["held_out_before"] or {}, summary["held_out_after"]
    changes = [
        f"{title} {form.format(before[name]) if before.get(name) is not None else '?'} → {form.format(after[name])}"
        for name, title, form, panel in columns
        if panel and after.get(name) is not None
    ]
    yield f"held-out rows: {', '.join(changes)}"
    if summary["rewards"]:
        yield "rewards: " + ", ".join(f"{name} × {weight:g}" for name, weight in summary["rewards"].items())
    peak, dense = summary["peak_memory_bytes"], summary["dense_would_need_bytes"]
    size = one_unit([peak, dense])
    yield (
        f"memory: {size(peak)} at the peak, the whole process; dense logits of one forward "
        f"pass with their log-softmax would be {size(dense)} more"
    )
    yield f"{summary['training_seconds']:.0f} s of training"
    place = Path(summary["output_dir"])
    files = [name for name in ("align.png", "metrics.jsonl", "summary.json", "model") if (place / name).exists()]
    yield f"in {on_one_line(str(place))}: {', '.join(files)}"


def plot(path: Path, method: str, records: list[dict[str, Any]]) -> None:
    """Reward, self-certainty and KL over the steps (pairs: loss, accuracy and margin), and the held-out rows."""
    steps = steps_of(records)
    held = [record for record in records if "held_out" in record]
    panels = [row for row in columns_of(method, steps) if row[3]]
    figure = Figure(figsize=(7, 2.1 * len(panels) + 0.6), dpi=150, layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, title, form, _) in zip(grid, panels, strict=True):
        at = [record["step"] for record in steps if record.get(name) is not None]
        values = [record[name] for record in steps if record.get(name) is not None]
        recent = [fmean(values[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(values))]
        axes.plot(at, values, color=LOGITLESS, linewidth=1, alpha=0.35, label="training")
        axes.plot(at, recent, color=LOGITLESS, linewidth=2, label=f"training, mean of {SMOOTH} steps")
        seen = [(record["step"], record["held_out"][name]) for record in held if name in record["held_out"]]
        if seen:
            axes.plot(
                *zip(*seen, strict=True), "D", color=DENSE, markersize=5, label="held out", clip_on=False, zorder=3
            )
            for i, (step, value) in enumerate(seen):
                axes.annotate(
                    form.format(value),
                    (step, value),
                    (8, -3) if i else (6, 5),
                    textcoords="offset points",
                    ha="left",
                    color=DENSE,
                    fontsize=8,
                )
        axes.set_ylabel(f"{title}\n{UNITS[name]}" if name in UNITS else title)
        axes.margins(y=0.18)
    grid[0].legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    grid[-1].set_xlabel("optimizer step")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(f"{method}: {METHODS[method].what}", fontsize=11, color=GREY)
    finish(figure, list(grid), path)
