"""The steps of a comparison: each metric's mean over seeds with its interval, as numbers and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...common.plots import finish
from .intervals import interval, ratios, shown

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
    ("memory_bytes", "memory of a batch, MiB", lambda r: r["memory_bytes"] / 2**20),
)
LOGARITHMIC = {"grad_norm", "grad_variance"}
IN_NUMBERS = ("train/reward", "train/kl", "val/reward_mean", "grad_variance")
COLOURS = {
    "ste": "#1f6feb",
    "gumbel": "#2a9d8f",
    "reinforce": "#d1495b",
    "ppo": "#e9a23b",
    "ste_legacy": "#8250df",
    "gumbel_legacy": "#6e7781",
}


def curves(records: Sequence[Record]) -> Record:
    """{metric: {method: [{step, mean, low, high, values}]}}; low and high of two seeds or more."""
    named = {key: value for key, _, value in PANELS}
    return {key: {m: _curve(records, m, key, named[key]) for m in _methods(records)} for key in IN_NUMBERS}


def _methods(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in records))


def _curve(records: Sequence[Record], method: str, key: str, value: Callable[[Record], float]) -> list[Record]:
    own = [r for r in records if r["method"] == method and r.get(key) is not None]
    found = []
    for step in sorted({r["step"] for r in own}):
        values = [value(r) for r in own if r["step"] == step]
        positive = key in LOGARITHMIC and min(values) > 0
        over_seeds = ratios(values, [1.0] * len(values)) if positive else interval(values)
        found.append({"step": step, **over_seeds})
    return found


def draw(path: Path, records: Sequence[Record]) -> None:
    """Every metric over the steps: the mean over seeds, and a band for an interval that is shown; memory as bars."""
    figure = Figure(figsize=(12, 9), dpi=120, layout="constrained")
    grid = figure.subplots(3, 3).ravel()
    for axes, (key, title, value) in zip(grid, PANELS, strict=True):
        axes.set_title(title, fontsize=10)
        found = {name: _curve(records, name, key, value) for name in _methods(records)}
        if key == "memory_bytes":
            _bars(axes, found)
            continue
        for name, points in found.items():
            _line(axes, name, points)
        _frame(axes, [x for points in found.values() for point in points for x in point["values"]], key)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in grid[-3:-1]:
        axes.set_xlabel("optimizer step")
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    finish(figure, list(grid), path)


def _line(axes: Axes, name: str, points: Sequence[Record]) -> None:
    at = [x["step"] for x in points]
    axes.plot(at, [x["mean"] for x in points], color=COLOURS[name], linewidth=1.5, label=name)
    if points and all(map(shown, points)):
        low, high = [x["low"] for x in points], [x["high"] for x in points]
        axes.fill_between(at, low, high, color=COLOURS[name], alpha=0.12, linewidth=0)


def _frame(axes: Axes, values: Sequence[float], key: str) -> None:
    """Shows all that was measured; an interval may be far wider."""
    if not values:
        return
    low, high = min(values), max(values)
    if key in LOGARITHMIC and low > 0:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.5, high * 1.5)
    else:
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - room, high + room)


def _bars(axes: Axes, found: dict[str, list[Record]]) -> None:
    """A bar for each method's one number, which no step changes."""
    means = {name: points[0]["mean"] for name, points in found.items() if points}
    bars = axes.barh(list(means), list(means.values()), color=[COLOURS[name] for name in means])
    axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.tick_params(axis="y", labelsize=8)
