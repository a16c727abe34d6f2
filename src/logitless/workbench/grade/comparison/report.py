"""What a comparison came to: its numbers by method, tables for a terminal, and a page with the figure."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....pages import document
from ....units import one_unit, plural
from ...common.files import write_text
from ...common.say import say
from ...common.tables import WholeTable
from ...runs.examples import cut
from .criteria import MET, NOT_MET, beside_legacy, criteria
from .intervals import FEWEST, SAID, differences, interval, shown

Record = dict[str, Any]

PLOT_FILE, PAGE_FILE = "comparison.png", "comparison.html"
PROMISED = "what the report and the paper promise"
NOISE = "what two seeds of the legacy differ by"
FIRST = "ste"  # whose test reward the others' is set against
COLUMNS = ("method", "reward", "sd", "95 %", "KL", "gap", "var/mean²", "s/step", "memory")
VERDICTS = {MET: "green", NOT_MET: "bold red"}  # the third has no colour
TIMES = {"memory": "memory of a batch", "seconds_per_step": "seconds a step", "grad_variance": "gradient variance"}
MORE = ("reward in training", "KL in training", "test reward", "test KL")
STYLE = "table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; } \
th, td { padding: 0.2rem 0.8rem 0.2rem 0; vertical-align: top; white-space: pre-wrap; \
text-align: left; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; } \
.wide { overflow-x: auto; } img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }"


def table(summaries: Sequence[Record], left_out: dict[str, str] | None = None) -> Record:
    """Of each method: test reward, its interval over seeds and its difference to ste's of the same seeds; the rest.

    Then each new method beside its own legacy, and a verdict for each criterion. summaries: in the order of the seeds.
    """
    runs: dict[str, list[Record]] = {}
    for one in summaries:
        runs.setdefault(one["method"], []).append(one)
    methods = {name: _of(own) for name, own in runs.items()}
    for name, found in methods.items():
        if name != FIRST and FIRST in methods:
            rewards = (methods[x]["test_reward"]["values"] for x in (name, FIRST))
            found[f"test_reward_minus_{FIRST}"] = differences(*rewards)
    return {
        "methods": methods,
        "beside_legacy": beside_legacy(runs),
        "criteria": criteria(runs, left_out or {}),
        "intervals": SAID,
        "test_samples": summaries[-1]["after"]["test/samples"],
    }


def _of(own: Sequence[Record]) -> Record:
    """One method's numbers."""
    used = [x["memory_bytes"] for x in own if x["memory_bytes"]]
    looks = [y for x in own for y in zip(x["grad_variances"], x["grad_mean_squares"], strict=True)]
    finite = [look for look in looks if None not in look]  # null where a gradient was not
    return {
        "test_reward": interval([x["after"]["test/reward_mean"] for x in own]),
        "test_reward_std": fmean(x["after"]["test/reward_std"] for x in own),
        "val_reward_before": fmean(x["before"]["val/reward_mean"] for x in own),
        "val_reward_after": fmean(x["after"]["val/reward_mean"] for x in own),
        "test_kl": interval([x["after"]["test/kl"] for x in own]),
        "train_reward": interval([x["training"]["reward"] for x in own]),
        "train_kl": interval([x["training"]["kl"] for x in own]),
        "generalisation_gap": interval([x["generalisation_gap"] for x in own]),
        "seconds_per_step": fmean(x["seconds_per_step"] for x in own),
        "memory_bytes": max(used) if used else None,
        "peak_memory_bytes": max(x["peak_memory_bytes"] for x in own),
        "coverage": fmean(x["coverage"] for x in own),
        "grad_variance": fmean(x for x, _ in finite) if finite else None,
        "grad_mean_square": fmean(x for _, x in finite) if finite else None,
    }


def relative(record: Record) -> float:
    """The variance of a gradient in units of its mean's square; infinite where the mean is lost in it."""
    square = record["grad_mean_square"]
    return record["grad_variance"] / square if square > 0 else math.inf


def _methods(summary: Record) -> Iterator[list[str]]:
    """A row of COLUMNS for each method."""
    size = one_unit(x["memory_bytes"] or 0 for x in summary["methods"].values())
    for name, x in summary["methods"].items():
        reward = x["test_reward"]
        yield [
            name,
            f"{reward['mean']:.3f}",
            f"{x['test_reward_std']:.2f}",
            f"{reward['low']:.3f}-{reward['high']:.3f}" if shown(reward) else "",
            f"{x['test_kl']['mean']:.2f}",
            f"{x['generalisation_gap']['mean']:+.3f}",
            "" if x["grad_variance"] is None else f"{relative(x):.3g}",
            f"{x['seconds_per_step']:.2f}",
            "" if x["memory_bytes"] is None else size(x["memory_bytes"]),
        ]


def _beside(summary: Record) -> Iterator[list[str]]:
    """A row for each quantity, a column for each new method beside its legacy."""
    found = summary["beside_legacy"].values()
    for key, title in (*TIMES.items(), *((name, name) for name in MORE)):
        if any(key in x for x in found):
            yield [title, *(_said(x.get(key), key in TIMES) for x in found)]


def _said(measured: Record | None, times: bool) -> str:
    """A ratio or a difference with its interval."""
    if measured is None:
        return ""
    form = "{:.3g}" if times else "{:+.3f}"
    return f"{form.format(measured['mean'])}{' ×' if times else ''}{_range(measured, form.format, 'low', 'high')}"


def _range(measured: Record, form: Callable[[float], str], *ends: str) -> str:
    """ " (low to high)"; nothing where too few seeds have an interval, or its ends are one number."""
    texts = [form(measured[end]) for end in ends] if shown(measured) else []
    return f" ({' to '.join(texts)})" if len(set(texts)) > 1 else ""


def _criteria(summary: Record) -> Iterator[list[str]]:
    """[verdict, what was expected, measured and why] for each criterion."""
    for x in summary["criteria"]:
        times = x["criterion"] in ("memory", "gradient variance")
        measured = [_less(x["measured"]) if times else _said(x["measured"], False), x["why"]]
        expected = x["expected"] or f"against {x['against']}"
        yield [x["verdict"], f"{x['method']}: {x['criterion']} {expected}", ", ".join(y for y in measured if y)]


def _less(measured: Record | None) -> str:
    """A ratio turned round: how many times less."""
    if measured is None:
        return ""
    return f"{1 / measured['mean']:.3g}× less{_range(measured, lambda ratio: f'{1 / ratio:.3g}', 'high', 'low')}"


def _lines(summary: Record) -> Iterator[str]:
    before = fmean(x["val_reward_before"] for x in summary["methods"].values())
    for name, reason in summary["left_out"].items():
        yield f"{name} is left out: {reason}"
    yield f"validation reward before: {before:.3f}; reward, sd: of {plural(summary['test_samples'], 'test sample')}"
    yield "gap: reward in training less that of the test; var/mean²: of a batch's gradient"
    yield "memory: of one batch's gradient, beside weights, gradients and optimizer"
    none = f"not shown: {plural(summary['seeds'], 'seed')}; give --seeds {FEWEST} or more"
    yield f"intervals: {summary['intervals'] if summary['seeds'] >= FEWEST else none}"


def _title(summary: Record) -> str:
    return f"{summary['model']}: {plural(summary['steps'], 'step')}, {plural(summary['seeds'], 'seed')}"


def _pairs(summary: Record) -> list[str]:
    return [f"{new} / {x['legacy']}" for new, x in summary["beside_legacy"].items()]


def _promised(summary: Record) -> str:
    """What the verdicts are about, and what ± says where one has it."""
    noisy = any("±" in row["expected"] for row in summary["criteria"])
    return f"{PROMISED}; ±: {NOISE}" if noisy else PROMISED


def show(summary: Record, console: Console) -> None:
    """The tables of a comparison: methods, each new one beside its legacy, and the verdicts; 80 columns hold them."""
    say(console, _title(summary))
    shown = _table(COLUMNS)
    for row in _methods(summary):
        shown.add_row(*row)
    console.print(shown, highlight=False)
    for line in _lines(summary):
        say(console, line)
    if summary["beside_legacy"]:
        say(console, "\neach new method beside its own legacy, times and differences, seed by seed")
        shown = _table(["", *_pairs(summary)])
        for row in _beside(summary):
            shown.add_row(*row)
        console.print(shown, highlight=False)
    say(console, f"\n{_promised(summary)}")
    shown = WholeTable(box=None, padding=(0, 1, 0, 0), show_header=False)
    shown.add_column(no_wrap=True)
    for verdict, *rest in _criteria(summary):
        shown.add_row(Text(verdict, VERDICTS.get(verdict, "")), *rest)
    console.print(shown, highlight=False)
    say(console, f"\nin {summary['output_dir']}: {PLOT_FILE}, {PAGE_FILE}, metrics.jsonl, summary.json")


def _table(columns: Sequence[str]) -> Table:
    shown = WholeTable(box=None, padding=(0, 1, 0, 0))  # narrow enough for 80 columns
    for i, name in enumerate(columns):
        shown.add_column(name, justify="right" if i else "left", no_wrap=True)
    return shown


def write_page(path: Path, plot: Path, summary: Record, completions: dict[str, Record] | None = None) -> None:
    """The same with the figure, as one page that opens offline.

    completions: of each method what `runs/examples.py` keeps, one before and one after, of the same prompt and noise.
    """
    image = base64.b64encode(plot.read_bytes()).decode("ascii")
    parts = [f"<h1>{html.escape(_title(summary))}</h1>", f"<h2>{_promised(summary).capitalize()}</h2>"]
    parts.append(_html(["verdict", "criterion", "measured"], _criteria(summary)))
    parts += [f"<p>{html.escape(line)}</p>" for line in _lines(summary)]
    if summary["beside_legacy"]:
        parts.append("<h2>Each new method beside its own legacy, times and differences, seed by seed</h2>")
        parts.append(_html(["", *_pairs(summary)], _beside(summary)))
    parts += ["<h2>Methods</h2>", _html(COLUMNS, _methods(summary))]
    if completions:
        parts.append("<h2>A completion before and after, of the same prompt and noise</h2>")
        parts.append(_html(("method", "", "reward", "prompt", "completion"), _completions(completions)))
    parts.append("<h2>Steps</h2>")
    if summary["seeds"] > 1:
        bands = f"; bands: {html.escape(summary['intervals'])}" if summary["seeds"] >= FEWEST else ""
        parts.append(f"<p>Lines: means over seeds{bands}.</p>")
    parts.append(f'<img alt="every metric over the steps" src="data:image/png;base64,{image}">')
    write_text(path, document(_title(summary), STYLE, "\n".join(parts)))


def _completions(completions: dict[str, Record]) -> Iterator[list[str]]:
    for method, found in completions.items():
        for when, example in found.items():
            reward = "" if example["reward"] is None else f"{example['reward']:.3f}"
            made = "".join(token["text"] for token in example["tokens"])
            yield [method, when, reward, cut(example["prompt"]), made]


def _html(columns: Sequence[str], rows: Iterator[list[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table><thead>{line(columns, "th")}</thead><tbody>{body}</tbody></table></div>'
