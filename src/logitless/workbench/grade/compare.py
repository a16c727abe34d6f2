"""`--method all`: every method on one task, seed by seed, and how they compare."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from ...errors import OptionError
from ...units import format_bytes
from ...versions import versions
from ..runs.files import read_lines, write_json, write_lines
from ..runs.model import align_tokens, build
from ..runs.plots import finish
from ..runs.rundir import RUN_FILE, SUMMARY_FILE, claim, explained, record, stored
from ..runs.say import say
from ..runs.trainer import METRICS_FILE
from .config import LEGACY, METHODS_COMPARED, GradeConfig
from .single import PROMPTS_FILE, REWARD, SCHEMA, materials, policy_of, run_one

PLOT_FILE = "comparison.png"
FIRST = "ste"  # what the others are compared with

# Of Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom; beyond, two terms of its expansion.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Z95 = 1.95996

Record = dict[str, Any]

PANELS: tuple[tuple[str, str, Callable[[Record], float]], ...] = (
    ("train/reward", "reward in training", lambda r: r["train/reward"]),
    ("val/reward_mean", "validation reward", lambda r: r["val/reward_mean"]),
    ("train/kl", "KL, nats per continuation", lambda r: r["train/kl"]),
    ("grad_norm", "gradient norm", lambda r: r["grad_norm"]),
    ("grad_variance", "gradient variance", lambda r: r["grad_variance"]),
    ("tau", "τ", lambda r: r["tau"]),
    ("coverage", "coverage", lambda r: r["coverage"]),
    ("seconds", "seconds per step", lambda r: r["seconds"]),
    ("peak_memory_bytes", "peak memory, MiB", lambda r: r["peak_memory_bytes"] / 2**20),
)
LOGARITHMIC = {"grad_norm", "grad_variance"}
COLOURS = {
    "ste": "#1f6feb",
    "gumbel": "#2a9d8f",
    "reinforce": "#d1495b",
    "ppo": "#e9a23b",
    "ste_legacy": "#8250df",
    "gumbel_legacy": "#6e7781",
}


def run_all(config: GradeConfig, console: Console) -> dict[str, Any]:
    """Runs each method with each seed, on the same prompts and reward, and returns how they compare.

    Writes METHOD-SEED, a run's directory each, metrics.jsonl (all of theirs), comparison.png and summary.json. Resumed,
    it goes on with what is not finished. The legacy methods are left out, with the reason, where they do not fit.
    """
    source, tokenizer = policy_of(config, console)
    place = claim(config, "all")
    with explained(place, "align"):
        model = build(config, source).eval()
        align_tokens(model, tokenizer)
        materials(config, place, model, tokenizer, console)
        del model
        record(config, place)
        left_out: dict[str, str] = {}
        for seed in range(config.seed, config.seed + config.seeds):
            for method in METHODS_COMPARED:
                if method not in left_out:
                    _one(config, place, method, seed, left_out, console)
        return _conclude(config, place, left_out, console)


def _one(config: GradeConfig, whole: Path, method: str, seed: int, left_out: dict[str, str], console: Console) -> None:
    """One method's run, unless it is finished; from where it was killed, if it was."""
    place = whole / f"{method}-{seed}"
    if (place / SUMMARY_FILE).exists():
        return
    say(console, f"{method}, seed {seed} ...")
    reward = config.reward_model or str(whole / REWARD)
    given = replace(config, method=method, seed=seed, seeds=1, reward_model=reward, json=None, config=None)
    if (place / RUN_FILE).exists():
        given = replace(stored(place, given), resume=place, output_dir=None)
    else:
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole / PROMPTS_FILE, place / PROMPTS_FILE)
        given = replace(given, resume=None, output_dir=place)
    try:
        run_one(given, console)
    except OptionError as error:
        if method not in LEGACY:
            raise
        left_out[method] = str(error)
        say(console, f"{method} is left out: {error}")


def _conclude(config: GradeConfig, place: Path, left_out: dict[str, str], console: Console) -> dict[str, Any]:
    """The comparison of all that ran, as numbers and as a plot."""
    runs = {
        (method, seed): place / f"{method}-{seed}"
        for method in METHODS_COMPARED
        for seed in range(config.seed, config.seed + config.seeds)
        if method not in left_out
    }
    records = [
        {"method": method, "seed": seed, **x}
        for (method, seed), run in runs.items()
        for x in read_lines(run / METRICS_FILE)
    ]
    write_lines(place / METRICS_FILE, records)
    summary = {
        "schema": SCHEMA,
        "method": "all",
        "model": config.model,
        "reward_model": config.reward_model or str(place / REWARD),
        "data": config.data or "stdlib",
        "steps": config.max_steps,
        "seeds": config.seeds,
        **table([_summary(run) for run in runs.values()], records),
        "left_out": left_out,
        "versions": versions("torch", "transformers", "peft"),
        "output_dir": str(place),
    }
    draw(place / PLOT_FILE, records)
    write_json(place / SUMMARY_FILE, summary)
    return summary


def _summary(place: Path) -> dict[str, Any]:
    return json.loads((place / SUMMARY_FILE).read_text(encoding="utf-8"))


def table(summaries: list[Record], records: list[Record]) -> Record:
    """Of each method: test reward, its interval over seeds and its difference to ste's of the same seeds; the rest."""
    names = list(dict.fromkeys(x["method"] for x in summaries))
    rewards = {n: [x["after"]["test/reward_mean"] for x in summaries if x["method"] == n] for n in names}
    methods: Record = {}
    for name in names:
        own = [x for x in summaries if x["method"] == name]
        varied = [x for x in records if x["method"] == name and "grad_variance" in x]
        methods[name] = {
            "test_reward": interval(rewards[name]),
            "test_reward_std": fmean(x["after"]["test/reward_std"] for x in own),
            "val_reward_before": fmean(x["before"]["val/reward_mean"] for x in own),
            "val_reward_after": fmean(x["after"]["val/reward_mean"] for x in own),
            "test_kl": interval([x["after"]["test/kl"] for x in own]),
            "generalisation_gap": interval([x["generalisation_gap"] for x in own]),
            "seconds_per_step": fmean(x["seconds_per_step"] for x in own),
            "peak_memory_bytes": max(x["peak_memory_bytes"] for x in own),
            "coverage": fmean(x["coverage"] for x in own),
            "grad_variance": fmean(x["grad_variance"] for x in varied) if varied else None,
            "grad_mean_square": fmean(x["grad_mean_square"] for x in varied) if varied else None,
        }
        if name != FIRST and FIRST in rewards:
            differences = [a - b for a, b in zip(rewards[name], rewards[FIRST], strict=True)]
            methods[name][f"test_reward_minus_{FIRST}"] = interval(differences)
    return {
        "methods": methods,
        "intervals": "95 %, Student's t over seeds",
        "test_samples": own[0]["after"]["test/samples"],
    }


def interval(values: Sequence[float]) -> Record:
    """{mean, low, high, values}: Student's 95 % interval of the mean; none of a single value."""
    mean, n = fmean(values), len(values)
    found: Record = {"mean": mean, "values": list(values)}
    if n < 2:
        return found
    df = n - 1
    t = T95[df - 1] if df <= len(T95) else Z95 + (Z95**3 + Z95) / (4 * df)
    half = t * stdev(values) / math.sqrt(n)
    return found | {"low": mean - half, "high": mean + half}


def relative(record: Record) -> float:
    """The variance of a gradient in units of its mean's square; infinite where the mean is lost in it."""
    square = record["grad_mean_square"]
    return record["grad_variance"] / square if square > 0 else math.inf


def show(summary: Record, console: Console) -> None:
    """The table of a comparison."""
    say(console, f"{summary['model']}: {summary['steps']} steps, {summary['seeds']} seed(s)")
    shown = Table(box=None, padding=(0, 1, 0, 0))  # narrow enough for 80 columns
    columns = ("method", "reward", "sd", "95 %", "KL", "gap", "var/mean²", "s/step", "peak")
    for i, name in enumerate(columns):
        shown.add_column(name, justify="right" if i else "left", no_wrap=True)
    for name, x in summary["methods"].items():
        reward, variance = x["test_reward"], "" if x["grad_variance"] is None else f"{relative(x):.3g}"
        shown.add_row(
            name,
            f"{reward['mean']:.3f}",
            f"{x['test_reward_std']:.2f}",
            f"{reward['low']:.3f}-{reward['high']:.3f}" if "low" in reward else "",
            f"{x['test_kl']['mean']:.2f}",
            f"{x['generalisation_gap']['mean']:+.3f}",
            variance,
            f"{x['seconds_per_step']:.2f}",
            format_bytes(x["peak_memory_bytes"]),
        )
    console.print(shown, highlight=False)
    before = fmean(x["val_reward_before"] for x in summary["methods"].values())
    for name, reason in summary["left_out"].items():
        say(console, f"{name} is left out: {reason}")
    say(console, f"validation reward before: {before:.3f}; reward, sd: of {summary['test_samples']} test samples")
    none = "none of one seed: give --seeds 2 or more"
    say(console, f"intervals: {summary['intervals'] if summary['seeds'] > 1 else none}")
    say(console, f"in {summary['output_dir']}: comparison.png, metrics.jsonl, summary.json")


def draw(path: Path, records: list[Record]) -> None:
    """Every metric over the steps: the mean over seeds, and a band from the lowest to the highest."""
    figure = Figure(figsize=(12, 9), dpi=120, layout="constrained")
    grid = figure.subplots(3, 3, sharex=True).ravel()
    names = list(dict.fromkeys(r["method"] for r in records))
    for axes, (key, title, value) in zip(grid, PANELS, strict=True):
        for name in names:
            own = [r for r in records if r["method"] == name and key in r]
            at = sorted({r["step"] for r in own})
            each = [[value(r) for r in own if r["step"] == step] for step in at]
            axes.plot(at, [fmean(x) for x in each], color=COLOURS[name], linewidth=1.5, label=name)
            if any(len(x) > 1 for x in each):
                low, high = [min(x) for x in each], [max(x) for x in each]
                axes.fill_between(at, low, high, color=COLOURS[name], alpha=0.12, linewidth=0)
        axes.set_title(title, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if key in LOGARITHMIC:
            axes.set_yscale("log")
    for axes in grid[-3:]:
        axes.set_xlabel("optimizer step")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names), frameon=False)
    finish(figure, list(grid), path)
