"""A profile for people and machines: tables by rich, JSON with a versioned schema."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .measure import Measured
from .profile import Step
from .remedies import Remedy
from .stages import CATEGORIES, LARGEST, Recording
from .units import format_bytes

SCHEMA = 1
SHOWN_ON_HOST = 1 << 20  # bytes: scalars and masks made there are nothing to report
WIDE = 110  # columns of a console
NARROW = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def headline(step: Step, parameters: int) -> str:
    """The step on one line."""
    parts = [
        f"{step.model} ({parameters:,} parameters)",
        f"{step.batch_size:,} × {step.context_length:,} tokens",
        step.dtype,
        f"attention {step.attention}",
        f"optimizer {step.optimizer}",
    ]
    parts += ["gradient checkpointing"] * step.gradient_checkpointing
    parts += ["offloaded"] * step.offload_activations
    parts += [f"MLP in {step.mlp_tiles} tiles"] * (step.mlp_tiles > 1)
    parts += [f"LoRA rank {step.lora_rank}"] * bool(step.lora_rank)
    return " · ".join(parts)


def show(recordings: dict[str, Recording], main: str, console: Console, units: str = "GiB") -> None:
    """Stages and categories of every recording side by side; the largest tensors of `main`; findings."""
    console.print(_stages(recordings, units), highlight=False)
    for name, recording in recordings.items():
        peak = recording.peak
        console.print(
            f"[bold]{name}[/bold] peaks at [bold]{format_bytes(peak.nbytes, units)}[/bold] in {peak.stage}: "
            f"{peak.op} of {peak.module or 'the model'}",
            highlight=False,
        )
        if recording.host > SHOWN_ON_HOST:
            console.print(f"{name} keeps {format_bytes(recording.host, units)} on the host", highlight=False)
    console.print(_categories(recordings, units), highlight=False)
    console.print(f"[bold]largest tensors at the peak, {main}[/bold]")
    console.print(_largest(recordings[main], units, console.width), highlight=False)
    findings = dict.fromkeys(f for recording in recordings.values() for f in recording.findings)
    for finding in findings:
        console.print(f"[red]device[/red] {finding}", highlight=False, soft_wrap=True)


def as_text(recording: Recording) -> str:
    """One recording's tables as plain text."""
    text = io.StringIO()
    show({"this step": recording}, "this step", Console(file=text, width=120, color_system=None, legacy_windows=False))
    return text.getvalue()


def _columns(*names: str) -> Table:
    """A table with columns from ">name" (to the right), "=name" (to the left, never folded) and "<name"."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        right = name[0] == ">"
        table.add_column(name[1:], justify="right" if right else "left", no_wrap=name[0] != "<", overflow="fold")
    return table


def _stages(recordings: dict[str, Recording], units: str) -> Table:
    table = _columns("=stage", *(f">{name}{what}" for name in recordings for what in ("\nat its end", "\npeak")))
    names = dict.fromkeys(s.name for recording in recordings.values() for s in recording.stages)
    for name in names:
        cells = []
        for recording in recordings.values():
            found = [s for s in recording.stages if s.name == name]
            cells += (
                [format_bytes(found[-1].nbytes, units), format_bytes(max(s.peak for s in found), units)]
                if (found)
                else ["–", "–"]
            )
        table.add_row(name, *cells)
    return table


def _categories(recordings: dict[str, Recording], units: str) -> Table:
    table = _columns("=at the peak", *(f">{name}" for name in recordings))
    found = [recording.categories(recording.peak.event) for recording in recordings.values()]
    for category in CATEGORIES:
        if any(category in one for one in found):
            cells = (format_bytes(one[category], units) if category in one else "–" for one in found)
            table.add_row(category, *cells)
    return table


def _largest(recording: Recording, units: str, width: int) -> Table:
    """A line for each tensor, or two where the console is narrow; names of modules are never broken."""
    wide = width >= WIDE
    table = _columns(">bytes", *(("=tensor", "=category", "=module", "<operator") if wide else ("<tensor",)))
    for a in recording.alive(recording.peak.event)[:LARGEST]:
        shape = " × ".join(f"{n:,}" for n in a.shape)
        cells = format_bytes(a.nbytes, units), f"{shape} {NARROW.get(a.dtype, a.dtype)}"
        module = a.module.removeprefix("model.") or "the model"
        if wide:
            table.add_row(*cells, a.category, module, a.op)
        else:
            table.add_row(*cells)
            table.add_row("", f"[dim]{a.category}, {module}: {a.op}[/dim]")
    return table


def show_remedies(found: Sequence[Remedy], base: Recording, console: Console, units: str = "GiB") -> None:
    """Remedies by what they save."""
    table = _columns("<remedy", ">peak", ">saved", "<peaks in")
    table.add_row("as given", format_bytes(base.peak.nbytes, units), "–", base.peak.stage)
    for remedy in found:
        peak = remedy.recording.peak
        table.add_row(remedy.name, format_bytes(peak.nbytes, units), format_bytes(remedy.saved, units), peak.stage)
    console.print("[bold]remedies, each traced[/bold]")
    console.print(table, highlight=False)


def show_measured(measured: Measured, console: Console, units: str = "GiB") -> None:
    """Predicted against counted and measured peaks, stage by stage."""
    machine = "resident set" if measured.device == "cpu" else "allocator"
    table = _columns("<stage", ">predicted peak", ">counted", ">error", f">{machine}")
    rows = zip(measured.predicted.stages, measured.counted.stages, measured.readings, strict=True)
    for predicted, counted, (_, most) in rows:
        error = f"{100 * (predicted.peak / counted.peak - 1):+.2f} %"
        cells = (format_bytes(n, units) for n in (predicted.peak, counted.peak))
        table.add_row(predicted.name, *cells, error, format_bytes(most, units))
    console.print(f"[bold]predicted against a real run on {measured.device}[/bold]")
    console.print(table, highlight=False)
    if measured.device == "cuda":
        reserved, context = (format_bytes(n, units) for n in (measured.reserved, measured.context))
        console.print(f"margin: {reserved} reserved beyond that, {context} of context and libraries", highlight=False)


def as_json(
    step: Step,
    parameters: int,
    recordings: dict[str, Recording],
    found: Sequence[Remedy] = (),
    measured: Measured | None = None,
) -> dict[str, Any]:
    """The whole profile; sizes in bytes, `timeline` as (event, bytes), an event being an allocation or a free."""
    return {
        "schema": SCHEMA,
        "kind": "profile",
        "step": asdict(step),
        "parameters": parameters,
        "runs": {name: recording.as_json() for name, recording in recordings.items()},
        "remedies": [remedy.as_json() for remedy in found],
        "real": None if measured is None else measured.as_json(),
    }
