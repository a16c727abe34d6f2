"""`logitless demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..workbench.common.files import check_apart, check_no_folder, check_outputs
from ..workbench.demo.config import WRITTEN, DemoConfig
from . import options
from .inputs import check_inputs
from .output import deliver

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """A small real model, before and after a little training, on one page.

SmolLM2 answers questions, is fine-tuned on this package's own questions and answers with the logitless loss, and
answers again: under four minutes on two processor cores."""


def main(arguments: Sequence[str]) -> int:
    """Reads the options, runs the demo, says what changed and where the page lies."""
    config = options.parse(DemoConfig, prog="logitless demo", description=DESCRIPTION, arguments=arguments).check()
    check_outputs({"json": config.json}, {"model": config.model})
    if config.output_dir is not None:
        check_apart({"json": config.json}, config.output_dir, WRITTEN)
        check_no_folder(config.json, config.output_dir)
    check_inputs(config.model, "show")
    from ..workbench.demo.run import run
    from .screen import Screen  # below, so that --help needs no torch

    summary = run(config, Screen(stderr=True))
    deliver(summary, config.json, lambda console: _show(summary, console))
    return 0


def _answers(summary: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [summary[when]["answers"] for when in ("before", "after")]


def _show(summary: dict[str, Any], console: Console) -> None:
    from ..sample.terminal import coloured, legend

    for question, *answers in zip(summary["questions"]["asked"], *_answers(summary), strict=True):
        console.print(f"\n[bold]{question}[/bold]", highlight=False, soft_wrap=True)
        for when, answer in zip(("before", "after"), answers, strict=True):
            console.print(f"[dim]{when}[/dim]", highlight=False)
            console.print(coloured({**answer, "shown_prompt": ""}), highlight=False)
    console.print(legend())
    before, after = summary["before"]["perplexity"], summary["after"]["perplexity"]
    console.print(f"\nperplexity of answers that it was not trained on: {before:.1f} → {after:.1f}", highlight=False)
    console.print(f"page: {summary['page']}", highlight=False, soft_wrap=True, markup=False)
