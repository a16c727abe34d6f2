"""`logitless eval`."""

from __future__ import annotations

from collections.abc import Sequence

from ..workbench.evaluation.config import EvalConfig
from . import options
from .inputs import check_inputs
from .output import deliver

DESCRIPTION = """Evaluate a language model without its logits: perplexity, accuracy, calibration, and a page of plots.

By document and in total: perplexity, bits per byte, accuracy, top-k accuracy, entropy, self-certainty; with --against,
how far it is from another model. In total alone: expected calibration error, entropy and self-certainty against
correctness. With --tasks: lm-evaluation-harness, in the place of text. A run that was killed goes on when it is started
again with the same options; torchrun shares the work among ranks."""


def main(arguments: Sequence[str]) -> int:
    """Reads the options, evaluates, shows the summary."""
    config = options.parse(EvalConfig, prog="logitless eval", description=DESCRIPTION, arguments=arguments).check()
    check_inputs(config.model, "evaluate", config.data, others={"against": config.against})
    from ..workbench.evaluation.report import show
    from ..workbench.evaluation.run import run
    from .screen import Screen  # below, so that --help needs no torch

    summary = run(config, Screen(stderr=True))
    if summary:  # the first rank of a distributed launch
        deliver(summary, config.json, lambda console: show(summary, console), is_written=True)
    return 0
