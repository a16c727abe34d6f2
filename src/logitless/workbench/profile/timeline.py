"""Timelines as a picture: bytes alive over the step, stage by stage, recordings over each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...printable import shown
from ...units import format_bytes
from .recording import Recording

COLOURS = ("#d1495b", "#1b9aaa", "#edae49", "#30638e")
LEAST = 0.07  # of the width, for a stage of few operators
POINTS = 6000  # of a curve
GPU = 80 << 30
SHORT = {"after embedding": "embedding", "after first layer": "first\nlayer", "after full forward": "all layers"}
BEFORE = ("parameters", "optimizer state")  # is there when the step begins


def draw(recordings: dict[str, Recording], path: Path, title: str, units: str = "GiB") -> None:
    """Writes the PNG."""
    size = 1 << 30 if units == "GiB" else 10**9
    widths = _widths(list(recordings.values()))
    figure = Figure(figsize=(9.6, 5.0), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, recording) in zip(COLOURS, recordings.items(), strict=False):
        _curve(axes, recording, widths, name, colour, size, units)
    _stages(axes, widths)
    _gpu(axes, max(r.peak.nbytes for r in recordings.values()), size, units)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.1 * max(r.peak.nbytes for r in recordings.values()) / size)
    axes.set_ylabel(f"{units} alive")
    axes.set_title(shown(title), fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150, format="png")


def _widths(recordings: list[Recording]) -> dict[str, tuple[float, float]]:
    """Each stage's place on an axis from 0 to 1: its mean share of the events, so that recordings line up."""
    names = [name for name in dict.fromkeys(s.name for r in recordings for s in r.stages) if name not in BEFORE]
    share = {}
    for name in names:
        parts = [sum(s.end - s.start for s in r.stages if s.name == name) / len(r.curve) for r in recordings]
        share[name] = max(LEAST, sum(parts) / len(parts))
    total, place, found = sum(share.values()), 0.0, {}
    for name in names:
        found[name] = place, place + share[name] / total
        place = found[name][1]
    return found


def _curve(
    axes: Any,
    recording: Recording,
    widths: dict[str, tuple[float, float]],
    name: str,
    colour: str,
    size: int,
    units: str,
) -> None:
    xs, ys = [], []
    stretch = max(1, len(recording.curve) // POINTS)
    for stage in recording.stages:
        if stage.name not in widths:
            continue
        left, right = widths[stage.name]
        span = max(1, stage.end - stage.start)
        for start in range(stage.start, stage.end + 1, stretch):
            part = recording.curve[start : min(start + stretch, stage.end + 1)]
            where = left + (right - left) * (start - stage.start) / span
            xs += [where, where]
            ys += [min(part) / size, max(part) / size]
        xs.append(right)
        ys.append(recording.curve[stage.end] / size)
    peak = recording.peak
    axes.plot(
        xs,
        ys,
        color=colour,
        linewidth=1.1,
        drawstyle="steps-post",
        label=f"{name}: peak {format_bytes(peak.nbytes, units)}",
    )
    axes.fill_between(xs, ys, color=colour, alpha=0.12, linewidth=0, step="post")
    top = max(range(len(ys)), key=ys.__getitem__)
    axes.plot([xs[top]], [ys[top]], marker="o", markersize=4, color=colour)
    box = {"facecolor": rcParams["axes.facecolor"], "alpha": 0.8, "edgecolor": "none", "pad": 1}
    axes.annotate(
        f"{peak.op}\n{peak.module}",
        (xs[top], ys[top]),
        xytext=(7, 9),
        textcoords="offset points",
        fontsize=7,
        color=colour,
        va="center",
        bbox=box,
    )


def _stages(axes: Any, widths: dict[str, tuple[float, float]]) -> None:
    for left, _ in list(widths.values())[1:]:
        axes.axvline(left, color=rcParams["text.color"], linewidth=0.4, alpha=0.4)
    axes.set_xticks([(a + b) / 2 for a, b in widths.values()], [SHORT.get(n, n) for n in widths], fontsize=8)
    axes.tick_params(axis="x", length=0)


def _gpu(axes: Any, peak: int, size: int, units: str) -> None:
    """A GPU's memory, where the picture reaches it."""
    if peak > GPU // 2:
        axes.axhline(GPU / size, color=rcParams["text.color"], linestyle="--", linewidth=0.8)
        axes.annotate(
            f"a GPU of {GPU / size:.0f} {units}",
            (1, GPU / size),
            xytext=(-4, 3),
            textcoords="offset points",
            fontsize=8,
            ha="right",
        )
