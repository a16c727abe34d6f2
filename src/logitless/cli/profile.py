"""`logitless profile`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from ..workbench.common.files import check_outputs, write_whole
from ..workbench.common.options import (
    MEMORY_BUDGET,
    Checkpointing,
    JsonFile,
    KnownModel,
    LoraRank,
    MlpTiles,
    Offloading,
    PlannedBudget,
    Units,
    budget_bytes,
)
from . import options
from .output import deliver

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Where the memory of a training step goes: the real model, traced without a GPU and without memory.

Traces forward, loss, backward and optimizer step with dense logits and without them."""


@dataclass(frozen=True)
class ProfileConfig:
    """Options of `logitless profile`."""

    model: KnownModel = "qwen3-0.6b"
    context_length: int = 4096
    """Tokens of a sequence."""
    batch_size: int = 1
    """Sequences of the step."""
    loss: Literal["dense", "logitless"] = "logitless"
    """Both are traced; this one is measured by --real, lists its largest tensors, and is what the savings are of."""
    gradient_checkpointing: Checkpointing = False
    offload_activations: Offloading = False
    mlp_tiles: MlpTiles = 1
    attention: Literal["auto", "sdpa", "eager", "nsa"] = "auto"
    """sdpa (fused, no scores in memory), eager, or nsa (sparse); auto: eager where there is a softcap or no sdpa."""
    optimizer: Literal["adamw", "sgd", "none"] = "adamw"
    """adamw: fused, with states in the parameters' dtype."""
    lora_rank: LoraRank = 0
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of weights and activations alike: a step of `train --mixed-precision bf16` is not traced."""
    memory_budget: PlannedBudget = MEMORY_BUDGET
    savings: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Also trace the step with each of these changes, which takes as long again for each: all, or some of
    logitless-loss, checkpointing, offload, tiled-mlp, lora, half-context."""
    real: Literal["cpu", "cuda"] | None = None
    """Also run the step for real, and set predicted against measured."""
    units: Units = "GiB"
    json: JsonFile = None
    png: Path | None = None
    """Draw the timelines into this PNG."""
    html: Path | None = None
    """Write the profile as one HTML page that opens offline."""


def main(arguments: Sequence[str]) -> int:
    """Traces, prints, writes."""
    config = options.parse(ProfileConfig, prog="logitless profile", description=DESCRIPTION, arguments=arguments)
    check_outputs({"json": config.json, "png": config.png, "html": config.html}, {"model": config.model})
    budget = budget_bytes(config.memory_budget)
    from ..models.catalog import shape_of

    shape = replace(shape_of(config.model), sparse=config.attention == "nsa")  # refused before torch is imported
    from ..workbench.profile import recording_tables, tables  # below, so that --help needs no torch
    from ..workbench.profile.measure import check_there, measure
    from ..workbench.profile.savings import chosen, savings
    from ..workbench.profile.step import Step, both
    from ..workbench.runs.progress import working
    from .screen import Screen

    same = {field.name for field in fields(Step)} - {"memory_budget"}
    step = Step(**{name: getattr(config, name) for name in same}, memory_budget=budget).check()
    names = chosen(tuple(chain.from_iterable(config.savings)))
    measured = None
    check_there(config.real)
    with working(Screen(stderr=True)) as tell:
        recordings = both(step, tell)
        base = recordings[step.loss]
        found, refused = savings(step, base, names, recordings, tell)
        if config.real is not None:
            tell(f"running a step on {config.real}")
            measured = measure(step, config.real)
    title = tables.headline(step, shape.parameters)

    def show(console: Console) -> None:
        console.print(title, style="bold", highlight=False, markup=False)
        recording_tables.show(recordings, step.loss, console, config.units)
        if names:
            tables.show_savings(found, refused, base, console, config.units)
        else:
            tables.offer_savings(step, console)
        if measured is not None:
            tables.show_measured(measured, console, config.units)

    report = tables.as_json(step, shape.parameters, recordings, found, refused, measured)
    deliver(report, config.json, show)
    if config.png is not None:
        from ..workbench.profile.timeline import draw

        write_whole(config.png, lambda path: draw(recordings, path, title, config.units))
    if config.html is not None:
        from ..workbench.page.page import write_page

        write_page(config.html, profile=report, units=config.units)
    return 0
