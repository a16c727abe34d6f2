"""`logitless align`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path

from ..errors import OptionError
from ..workbench.align.config import METHODS, AlignConfig
from ..workbench.common.files import read_lines
from ..workbench.common.launch import launched_ranks
from ..workbench.common.options import require
from ..workbench.common.written import METRICS_FILE, PROMPTS_FILE, REWARD, ROWS_FILE
from ..workbench.grade.config import GRADE_METHODS, GradeConfig
from ..workbench.runs.ending import how_to_go_on, stoppable, where_it_is
from . import options
from .inputs import check_inputs, still_read
from .output import deliver

DESCRIPTION = """Align a language model by its own certainty, by rewards or by preferences, without its logits.

Without options: the model of `logitless train` (trained first if need be), on prompts from the same text.
Methods: intuitor, grpo, rloo and dpo, whose options follow. Seven more have options of their own, which logitless
align --method all --help lists: ste and gumbel (through the generated tokens), reinforce and ppo (the score function),
ste_legacy and gumbel_legacy (to compare with), and all, which runs and compares these."""

THROUGH_TOKENS = """Align a language model by backpropagation through the tokens that it generates (ste, gumbel), or by
the score function on the same rewards (reinforce, ppo); all compares them.

Without --model: a small model (trained first if need be), rewarded for prose rather than code, at the small sizes that
follow. --model NAME --help lists those for another model."""


def main(arguments: Sequence[str]) -> int:
    """Reads the options (command line over --config over a resumed run's own), aligns, shows the summary."""
    method = options.method_of(arguments)
    if method in GRADE_METHODS:
        return _grade(arguments)
    every = (*METHODS, *GRADE_METHODS)
    near = get_close_matches(str(method), every, n=1, cutoff=0.6)  # a file may say anything
    got = f"{method}; did you mean {near[0]}?" if near else method
    require(method is None or method in every, "method", f"one of {', '.join(every)}", got)
    config = parse(arguments)
    if launched_ranks() == 1:  # several look once they have met, so that all say what one of them misses
        check_inputs(config.model, "align", still_read(config.data, config.resume, ROWS_FILE))
    with stoppable(lambda: how_to_go_on(config.resume, "align")):
        from ..workbench.align.report import show
        from ..workbench.align.run import run
        from .screen import Screen  # here, so that --help needs no torch

        summary = run(config, Screen(stderr=True))
    if summary:  # the first rank of a distributed launch
        with stoppable(lambda: where_it_is(summary)):
            records = read_lines(Path(summary["output_dir"]) / METRICS_FILE)
            deliver(summary, config.json, lambda console: show(summary, records, console))
    return 0


def parse(arguments: Sequence[str]) -> AlignConfig:
    """The options as given, checked."""
    try:
        return options.layered(
            AlignConfig, prog="logitless align", description=DESCRIPTION, arguments=arguments
        ).check()
    except OptionError:
        theirs = {f.name for f in fields(GradeConfig)}.difference(f.name for f in fields(AlignConfig))
        for option in (argument.partition("=")[0] for argument in arguments):
            if option.startswith("--") and option[2:].replace("-", "_") in theirs:
                raise OptionError(f"{option} is of --method {', '.join(GRADE_METHODS)} alone: give one, too") from None
        raise


def _grade(arguments: Sequence[str]) -> int:
    """The same for the methods that differentiate through tokens, and those that they are compared with."""
    config = parse_grade(arguments)
    learned = (REWARD,) if config.reward_model is None and config.token_reward is None else ()
    data = still_read(config.data, config.resume, PROMPTS_FILE, *learned)
    check_inputs(config.model, "align", data, others={"reward-model": config.reward_model})
    with stoppable(lambda: how_to_go_on(config.resume, "align")):
        from ..workbench.grade.run import run, show
        from .screen import Screen  # here, so that --help needs no torch

        summary = run(config, Screen(stderr=True))
    with stoppable(lambda: where_it_is(summary)):
        deliver(summary, config.json, lambda console: show(summary, console))
    return 0


def parse_grade(arguments: Sequence[str]) -> GradeConfig:
    """The options of those methods as given, checked."""
    prog = f"logitless align --method {options.method_of(arguments) or GradeConfig.method}"  # whose --help lists these
    return options.layered(GradeConfig, prog=prog, description=THROUGH_TOKENS, arguments=arguments).check()
