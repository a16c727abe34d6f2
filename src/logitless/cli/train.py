"""`logitless train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..workbench.common.launch import launched_ranks
from ..workbench.common.written import TOKENS_FILE
from ..workbench.runs.ending import how_to_go_on, stoppable, where_it_is
from ..workbench.sft.config import TrainConfig
from . import options
from .inputs import check_inputs, still_read
from .output import deliver

DESCRIPTION = """Train a causal language model on text, without its logits.

Without options: a tiny model on the text of this Python's own standard library."""


def main(arguments: Sequence[str]) -> int:
    """Reads the options (command line over --config over a resumed run's own), trains, shows the summary."""
    config = parse(arguments)
    if launched_ranks() == 1:  # several look once they have met, so that all say what one of them misses
        data = still_read(config.data, config.resume, TOKENS_FILE) if config.teacher is None else config.data
        check_inputs(config.model, data=data, teacher=config.teacher)
    with stoppable(lambda: how_to_go_on(config.resume, "train")):
        from ..workbench.sft.run import run
        from ..workbench.sft.summary import show
        from .screen import Screen  # here, so that --help needs no torch

        summary = run(config, Screen(stderr=True))
    if summary:  # the first rank of a distributed launch
        with stoppable(lambda: where_it_is(summary)):
            deliver(summary, config.json, lambda console: show(summary, Path(summary["output_dir"]), console))
    return 0


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The options as given, checked."""
    return options.layered(TrainConfig, prog="logitless train", description=DESCRIPTION, arguments=arguments).check()
