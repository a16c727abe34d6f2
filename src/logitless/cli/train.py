"""`logitless train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..train.config import TrainConfig
from . import options

DESCRIPTION = """Train a causal language model on text, without its logits.

Without options: a tiny model on the text of this Python's own standard library."""


def main(arguments: Sequence[str]) -> int:
    """Reads the options (command line over --config over a resumed run's own), trains, shows the summary."""
    config = parse(arguments)
    from rich.console import Console  # below, so that --help needs no torch

    from ..train.files import write_json
    from ..train.sft import run
    from ..train.summary import show

    summary = run(config, Console(stderr=True))
    if summary:  # the first rank of a distributed launch
        to_stdout = config.json is not None and str(config.json) == "-"
        show(summary, Path(summary["output_dir"]), Console(stderr=to_stdout))
        if to_stdout:
            print(_json(summary))
        elif config.json is not None:
            write_json(config.json, summary)
    return 0


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The options as given, checked."""
    return options.layered(TrainConfig, prog="logitless train", description=DESCRIPTION, arguments=arguments).check()


def _json(value: object) -> str:
    import json

    return json.dumps(value, indent=2)
