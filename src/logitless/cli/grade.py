"""`logitless align --method ste`, gumbel and reinforce: options and output of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..train.grade_config import GRADE_METHODS, GradeConfig
from ..train.rundir import RUN_FILE
from . import options
from .output import deliver

DESCRIPTION = """Align a language model by backpropagation through the tokens that it generates (ste, gumbel).

Without options: the model of `logitless train` (trained first if need be), rewarded for prose rather than code."""


def asked_for(arguments: Sequence[str]) -> bool:
    """Whether --method, or the run that --resume names, is one of these."""
    value = _value_of("--method", arguments)
    run = _value_of("--resume", arguments)
    if value is None and run is not None and (Path(run) / RUN_FILE).is_file():
        return any(f'"method": "{name}"' in (Path(run) / RUN_FILE).read_text("utf-8") for name in GRADE_METHODS)
    return value in GRADE_METHODS


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The last value that is given for an option, as `--option value` or `--option=value`."""
    found = None
    for i, argument in enumerate(arguments):
        if argument == option and i + 1 < len(arguments):
            found = arguments[i + 1]
        elif argument.startswith(f"{option}="):
            found = argument.removeprefix(f"{option}=")
    return found


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
