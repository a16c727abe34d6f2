"""loss.png and memory.png."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...units import format_bytes
from .files import write_whole

LOGITLESS, DENSE, GREY = "#1f6feb", "#d1495b", "#6e7781"
SMOOTH = 5
COLOURS = {"logitless": LOGITLESS, "dense": DENSE}


def plot_loss(path: Path, records: list[dict[str, Any]], vocab_size: int) -> None:
    """Training loss per step, the held-out loss before and after, and the loss of a uniform guess."""
    steps = [r for r in records if "loss" in r]
    held = [r for r in records if "held_out_loss" in r]
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.axhline(math.log(vocab_size), color=GREY, linestyle=":", linewidth=1)
    axes.annotate(
        f"uniform guess, log {vocab_size:,}",
        (1, math.log(vocab_size)),
        (-2, 3),
        textcoords="offset points",
        xycoords=("axes fraction", "data"),
        ha="right",
        color=GREY,
        fontsize=8,
    )
    at, losses = [r["step"] for r in steps], [r["loss"] for r in steps]
    recent = [fmean(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]
    axes.plot(at, losses, color=LOGITLESS, linewidth=1, alpha=0.35, label="training")
    axes.plot(at, recent, color=LOGITLESS, linewidth=2, label=f"training, mean of {SMOOTH} steps")
    axes.plot(
        [r["step"] for r in held],
        [r["held_out_loss"] for r in held],
        "D",
        color=DENSE,
        markersize=6,
        label="held out",
        clip_on=False,
        zorder=3,
    )
    for record in held:
        last = record is held[-1] and len(held) > 1
        axes.annotate(
            f"{record['held_out_loss']:.2f}",
            (record["step"], record["held_out_loss"]),
            (8, -3) if last else (7, -13),  # the last beside the axes, where no line runs
            textcoords="offset points",
            ha="left",
            color=DENSE,
            fontsize=8,
        )
    axes.margins(y=0.1)  # room below the lowest number
    axes.set(xlabel="optimizer step", ylabel="nats per token", title="Loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    finish(figure, [axes], path)


def plot_memory(path: Path, step_memory: dict[str, Any], tokens: int, vocab_size: int) -> bool:
    """Memory above the model's during one step's loss and gradients, logitless against dense; False if unmeasured."""
    measured = [name for name in ("dense", "logitless") if "curve" in step_memory[name]]
    if not measured:
        return False
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    highest = 0.0
    for name in measured:
        colour, peak = COLOURS[name], step_memory[name]["peak_bytes"]
        seconds, used = zip(*step_memory[name]["curve"], strict=True)
        mib = [max(0, value) / 2**20 for value in used]
        highest = max(highest, *mib)
        axes.fill_between(seconds, mib, color=colour, alpha=0.18, linewidth=0)
        axes.plot(seconds, mib, color=colour, linewidth=1.5, label=f"{name}: +{format_bytes(peak)} at the peak")
    axes.set(
        xlabel="seconds",
        ylabel="MiB above the model",
        title=f"One step's loss and gradients: {tokens:,} tokens × {vocab_size:,} entries",
    )
    axes.set_ylim(0, 1.3 * highest)  # room for the legend
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="upper left")
    finish(figure, [axes], path)
    return True


def finish(figure: Figure, panels: list[Any], path: Path) -> None:
    """Light axes, and the figure as a PNG, whole or not at all."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    write_whole(path, lambda temporary: figure.savefig(temporary, format="png"))
