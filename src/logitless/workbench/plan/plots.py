"""The plan as a picture: stacked bars per phase, dense beside logitless, the GPU as a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...printable import shown
from .plan import Plan
from .report import headline
from .setting import GIB

# (category, colour, words of the components' names that belong to it, in this order)
VOCABULARY = ("logit", "log-softmax", "softcap", "soft tok", "probab", "basis", "per-token")
CATEGORIES = (
    ("logits and their gradients", "#d1495b", VOCABULARY),
    ("head's gradient", "#edae49", ("head's gradient",)),
    ("other models", "#8d99ae", ("reference", "critic", "reward")),
    ("optimizer and master weights", "#30638e", ("optimizer", "master")),
    ("gradients", "#00798c", ("gradient", "buckets", "reduce-scatter")),
    ("parameters", "#5fa8d3", ("parameters", "adapters", "gathered")),
    ("key-value cache", "#9c6ade", ("cache",)),
    ("activations", "#66a182", ("",)),
)


def category(name: str) -> str:
    """The category of a component."""
    if "activation gradients" in name or "hidden states" in name:
        return "activations"
    return next(label for label, _, words in CATEGORIES if any(word in name for word in words))


def draw(dense: Plan, logitless: Plan, path: Path, units: str = "GiB") -> None:
    """Writes the PNG."""
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = GIB if units == "GiB" else 10**9
    phases = logitless.setting.kind.phases
    figure = Figure(figsize=(1.2 + 1.15 * len(phases), 5.4), layout="constrained")
    axes = figure.add_subplot()
    for offset, plan in ((-0.21, dense), (0.21, logitless)):
        _bars(axes, plan, offset, size)
    limit = (logitless.setting.gpu_bytes - logitless.setting.reserve) / size
    axes.axhline(limit, color=rcParams["text.color"], linestyle="--", linewidth=1)
    usable = f"usable: {_number(limit)} {units}"
    axes.annotate(usable, (-0.45, limit), xytext=(0, 3), textcoords="offset points", fontsize=8)
    axes.set_ylim(0, 1.05 * max(limit, dense.peak / size, logitless.peak / size))
    axes.set_xticks(range(len(phases)), [phase.replace(" ", "\n") for phase in phases])
    axes.set_ylabel(f"{units} on each GPU")
    axes.set_title(
        shown(f"{headline(logitless.setting, units)}\nleft bars: dense, right bars: logitless"), fontsize=9, loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150, format="png")


def _bars(axes: Any, plan: Plan, offset: float, size: int) -> None:
    for x, phase in enumerate(plan.setting.kind.phases):
        bottom = 0.0
        for label, colour, _ in reversed(CATEGORIES):
            alive = [c.nbytes for c in plan.components if phase in c.phases and category(c.name) == label]
            height = sum(alive) / size
            axes.bar(x + offset, height, 0.38, bottom=bottom, color=colour)
            bottom += height
        if bottom:
            axes.annotate(_number(bottom), (x + offset, bottom), ha="center", va="bottom", fontsize=7)


def _number(size: float) -> str:
    """Of two digits at least: "66", "0.48"."""
    return f"{size:,.0f}" if size >= 9.95 else f"{size:.2g}"


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label) for label, colour, _ in CATEGORIES]
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
