"""A profile for people and machines: tables by rich, JSON with a versioned schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from rich.console import Console

from ...units import format_bytes, one_unit
from ..common.tables import columns
from .measure import Measured
from .recording import Recording
from .savings import CHANGES, Saving
from .step import Step

SCHEMA = 1


def headline(step: Step, parameters: int) -> str:
    """The step on one line."""
    parts = [
        f"{step.model} ({parameters:,} parameters)",
        f"{step.batch_size:,} × {step.context_length:,} tokens",
        step.dtype,
        f"attention {step.attention}",
        f"optimizer {step.optimizer}",
    ]
    if step.gradient_checkpointing:
        parts.append("gradient checkpointing")
    if step.offload_activations:
        parts.append("offloaded")
    if step.mlp_tiles > 1:
        parts.append(f"MLP in {step.mlp_tiles} tiles")
    if step.lora_rank:
        parts.append(f"LoRA rank {step.lora_rank}")
    return " · ".join(parts)


def show_savings(
    found: Sequence[Saving], refused: Mapping[str, str], base: Recording, console: Console, units: str = "GiB"
) -> None:
    """What each change saves, the most first, and why the model takes others not."""
    table = columns("<saving", ">peak", ">saved", "<peaks in")
    size = one_unit((base.peak.nbytes, *(saving.recording.peak.nbytes for saving in found)), units)
    table.add_row("as given", size(base.peak.nbytes), "–", base.peak.stage)
    for saving in found:
        peak = saving.recording.peak
        table.add_row(saving.name, size(peak.nbytes), size(saving.saved), peak.stage)
    console.print("[bold]savings, each traced[/bold]")
    console.print(table, highlight=False)
    for name, why in refused.items():
        console.print(f"no {name}: {why}", style="dim", highlight=False, markup=False)


def offer_savings(step: Step, console: Console) -> None:
    """The option that shows what was not asked for, and the changes of which it would."""
    others = ", ".join(name for name, change in CHANGES.items() if change(step) is not None)
    console.print(f"[dim]--savings all also traces the step with each of: {others}[/dim]", highlight=False)


def show_measured(measured: Measured, console: Console, units: str = "GiB") -> None:
    """Predicted against allocated and measured peaks, stage by stage."""
    machine = "resident set" if measured.device == "cpu" else "allocator"
    table = columns("<stage", ">predicted peak", ">allocated", ">error", f">{machine}")
    rows = list(zip(measured.predicted.stages, measured.allocated.stages, measured.readings, strict=True))
    size = one_unit((n for a, b, (_, most) in rows for n in (a.peak, b.peak, most)), units)
    for predicted, allocated, (_, most) in rows:
        error = f"{100 * (predicted.peak / allocated.peak - 1):+.2f} %"
        table.add_row(predicted.name, size(predicted.peak), size(allocated.peak), error, size(most))
    console.print(f"[bold]predicted against a real run on {measured.device}[/bold]")
    console.print(table, highlight=False)
    if measured.device == "cuda":
        reserved, context = (format_bytes(n, units) for n in (measured.reserved, measured.context))
        console.print(f"margin: {reserved} reserved beyond that, {context} of context and libraries", highlight=False)


def as_json(
    step: Step,
    parameters: int,
    recordings: dict[str, Recording],
    found: Sequence[Saving] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    measured: Measured | None = None,
) -> dict[str, Any]:
    """The whole profile; sizes in bytes, `timeline` as (event, bytes), an event being an allocation or a free."""
    return {
        "schema": SCHEMA,
        "kind": "profile",
        "step": asdict(step),
        "parameters": parameters,
        "runs": {name: recording.as_json() for name, recording in recordings.items()},
        "savings": [saving.as_json() for saving in found],
        "refused_savings": dict(refused),
        "real": None if measured is None else measured.as_json(),
    }
