"""`logitless score`."""

from __future__ import annotations

from collections.abc import Sequence

from ..workbench.scoring.config import ScoreConfig
from . import options
from .inputs import check_inputs
from .output import deliver

DESCRIPTION = """Score text with a language model: a parquet file with a row per token, without its logits.

Log-prob, rank, entropy, self-certainty, log-sum-exp and the best entries of each distribution. A run that was killed
goes on when it is started again with the same options; torchrun shares the work among ranks."""


def main(arguments: Sequence[str]) -> int:
    """Reads the options, scores, shows the summary."""
    config = options.parse(ScoreConfig, prog="logitless score", description=DESCRIPTION, arguments=arguments).check()
    check_inputs(config.model, "score with", config.data)
    from ..workbench.scoring.run import run
    from ..workbench.scoring.summary import show
    from .screen import Screen  # below, so that --help needs no torch

    summary = run(config, Screen(stderr=True))
    if summary:  # the first rank of a distributed launch
        deliver(summary, config.json, lambda console: show(summary, console), is_written=True)
    return 0
