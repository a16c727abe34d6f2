"""`logitless align --method ste`, gumbel, reinforce, ppo and all: options and output of their own."""

from __future__ import annotations

from collections.abc import Sequence

from ..train.grade_config import GradeConfig
from . import options
from .output import deliver

DESCRIPTION = """Align a language model by backpropagation through the tokens that it generates (ste, gumbel), or by the
score function on the same rewards (reinforce, ppo); all compares them.

Without --model: a small model (trained first if need be), rewarded for prose rather than code, at small sizes."""


def main(arguments: Sequence[str]) -> int:
    """Reads the options (command line over --config over a resumed run's own), aligns, shows the summary."""
    config = parse(arguments)
    from rich.console import Console  # below, so that --help needs no torch

    from ..train.grade import run, show

    summary = run(config, Console(stderr=True))
    deliver(summary, config.json, lambda console: show(summary, console))
    return 0


def parse(arguments: Sequence[str]) -> GradeConfig:
    """The options as given, checked."""
    return options.layered(GradeConfig, prog="logitless align", description=DESCRIPTION, arguments=arguments).check()
