"""`logitless sample`."""

from __future__ import annotations

from collections.abc import Sequence

from ..workbench.sampling.config import SampleConfig
from . import options
from .inputs import check_inputs, read_prompts
from .output import deliver

DESCRIPTION = """Sample text from a language model and keep what matters of each token, without its logits.

Each token is coloured by its probability under the model; on a terminal a single completion appears as it is drawn.
Prompts come from --prompt, --prompt-file or standard input."""


def main(arguments: Sequence[str]) -> int:
    """Samples, shows the text, writes the files that are asked for, whole or not at all."""
    config = options.parse(SampleConfig, prog="logitless sample", description=DESCRIPTION, arguments=arguments).check()
    check_inputs(config.model, "sample from")
    prompts = read_prompts(config.prompt, config.prompt_file)
    from ..sample.page import page
    from ..sample.terminal import show
    from ..workbench.common.files import write_table, write_text, write_whole
    from ..workbench.sampling.run import run
    from .screen import Screen  # below, so that --help needs no torch

    screen = Screen()
    streams = screen.is_terminal and len(prompts) * config.completions == 1 and str(config.json) != "-"
    summary, table = run(config, prompts, Screen(stderr=True), screen if streams else None)
    if config.parquet is not None:
        write_whole(config.parquet, lambda path: write_table(path, table))
    if config.html is not None:
        write_text(config.html, page(summary))
    deliver(summary, config.json, lambda console: show(summary, console, config.show_alternatives, streams))
    return 0
