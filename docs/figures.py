"""The figures of the docs, each for a light and a dark page: `python -m docs.figures [--only NAME]`.

Drawn by the same functions as `--png` of the commands and of `bench.plot`, on no ground of their own. A figure of a
result file says inside, as its `Source`, which contents of that file it is of.
"""

import argparse
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from bench.harness import read_lines
from bench.plot import draw as draw_bench
from bench.scaling import draw as draw_scaling
from docs.tables.shared import RESULTS
from logitless.models.catalog import shape_of
from logitless.workbench.plan.plan import both as both_plans
from logitless.workbench.plan.plots import draw as draw_plan
from logitless.workbench.plan.setting import Setting
from logitless.workbench.profile import tables
from logitless.workbench.profile.step import Step
from logitless.workbench.profile.step import both as both_steps
from logitless.workbench.profile.timeline import draw as draw_profile

ROOT = Path(__file__).parents[1]
INKS = {
    "light": ("#24292f", "#ffffff"),
    "dark": ("#d5d9e0", "#1e2129"),
}  # of what is written, and the page's ground
Draw = Callable[[Path], None]
OF_RESULTS: dict[str, tuple[str, Callable[[list[dict[str, Any]], Path], None]]] = {
    "bench": ("benchmark.jsonl", draw_bench),
    "scaling": ("scaling.jsonl", draw_scaling),
}


def scheme(name: str) -> dict[Any, Any]:
    """matplotlib's settings for a page: its ink, and no ground, but for the boxes behind some numbers."""
    ink, ground = INKS[name]
    inks = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
        "grid.color",
    )
    return {**dict.fromkeys(inks, ink), "axes.facecolor": ground, "savefig.transparent": True}


def source(name: str) -> str:
    """The SHA-256 of the result file that a figure is of."""
    return sha256((RESULTS / OF_RESULTS[name][0]).read_bytes()).hexdigest()


def of_results(name: str) -> Draw:
    """A figure of a result file, with the file's `source` inside."""
    file, draw = OF_RESULTS[name]
    records, told = read_lines(RESULTS / file), PngInfo()
    told.add_text("Source", source(name))

    def drawn(path: Path) -> None:
        draw(records, path)
        with Image.open(path) as image:
            image.load()  # before the file is written anew
            image.save(path, pnginfo=told, dpi=image.info["dpi"])

    return drawn


def plan() -> Draw:
    """docs/how-to/plan.md's first command."""
    sizes: dict[str, Any] = {
        "batch_size": 8,
        "responses_per_prompt": 8,
        "prompt_length": 2048,
        "response_length": 4096,
    }
    plans = both_plans(
        Setting(shape_of("qwen2.5-1.5b"), "intuitor", gpus=8, gradient_checkpointing=True, **sizes)
    )
    return lambda path: draw_plan(*plans, path)


def profile() -> Draw:
    """docs/how-to/profile.md's command."""
    step = Step(model="4b", context_length=131_072, gradient_checkpointing=True).check()
    recordings, title = both_steps(step), tables.headline(step, shape_of(step.model).parameters)
    return lambda path: draw_profile(recordings, path, title)


FIGURES: dict[str, Callable[[], Draw]] = {
    **{name: partial(of_results, name) for name in OF_RESULTS},
    "plan": plan,
    "profile": profile,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.figures", description=__doc__)
    parser.add_argument("--only", choices=FIGURES, help="one figure; all unless given")
    only = parser.parse_args(argv).only
    for name in [only] if only else FIGURES:
        draw = FIGURES[name]()
        for page in INKS:
            path = ROOT / "docs" / "images" / f"{name}-{page}.png"
            with rc_context(scheme(page)):
                draw(path)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
