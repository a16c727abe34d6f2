"""A recording's tables for people: stages, categories and the largest tensors."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...models.instances import any_layer
from ...units import one_unit
from ..common.tables import columns
from .recording import CATEGORIES, LARGEST, Recording
from .storages import Allocation

SHOWN_ON_HOST = 1 << 20  # bytes: scalars and masks made there are nothing to report
WIDE = 110  # columns of a console
NARROW = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def show(recordings: dict[str, Recording], main: str, console: Console, units: str = "GiB") -> None:
    """Stages and categories of every recording side by side; the largest tensors of `main`; findings.

    A line of code, or a name, is no markup, whatever its brackets.
    """
    at_peak = {name: recording.categories(recording.peak.event) for name, recording in recordings.items()}
    size = one_unit((n for r in recordings.values() for stage in r.stages for n in (stage.nbytes, stage.peak)), units)
    console.print(_stages(recordings, size), highlight=False)
    for name, recording in recordings.items():
        peak = recording.peak
        where = f" in {peak.stage}: {peak.op} of {peak.module or 'the model'}"
        console.print(Text.assemble((name, "bold"), " peaks at ", (size(peak.nbytes), "bold"), where))
        if recording.host > SHOWN_ON_HOST:
            console.print(Text(f"{name} keeps {size(recording.host)} on the host"))
    console.print(_categories(at_peak, size), highlight=False)
    console.print(Text(f"largest tensors at the peak, {main}", "bold"))
    console.print(_largest(recordings[main], units, console.width), highlight=False)
    findings = dict.fromkeys(f for recording in recordings.values() for f in recording.findings)
    for finding in findings:
        console.print(Text.assemble(("device", "red"), f" {finding}"), soft_wrap=True)


def as_text(recording: Recording) -> str:
    """One recording's tables as plain text."""
    text = io.StringIO()
    show({"this step": recording}, "this step", Console(file=text, width=120, color_system=None, legacy_windows=False))
    return text.getvalue()


def _stages(recordings: dict[str, Recording], size: Callable[[int], str]) -> Table:
    table = columns("=stage", *(f">{name}{what}" for name in recordings for what in ("\nat its end", "\npeak")))
    names = dict.fromkeys(s.name for recording in recordings.values() for s in recording.stages)
    for name in names:
        cells = []
        for recording in recordings.values():
            found = [s for s in recording.stages if s.name == name]
            if found:
                cells += [size(found[-1].nbytes), size(max(s.peak for s in found))]
            else:
                cells += ["–", "–"]
        table.add_row(name, *cells)
    return table


def _categories(at_peak: dict[str, dict[str, int]], size: Callable[[int], str]) -> Table:
    table = columns("=at the peak", *(f">{name}" for name in at_peak))
    for category in CATEGORIES:
        if any(category in one for one in at_peak.values()):
            cells = (size(one[category]) if category in one else "–" for one in at_peak.values())
            table.add_row(category, *cells)
    return table


def _largest(recording: Recording, units: str, width: int) -> Table:
    """A line for each tensor and those alike of other layers, or two where the console is narrow.

    Names of modules are never broken.
    """
    wide = width >= WIDE
    table = columns(">bytes", *(("=tensor", "=category", "=module", "<operator") if wide else ("<tensor",)))
    alike: dict[tuple[Any, ...], list[Allocation]] = {}
    for a in recording.alive(recording.peak.event):
        alike.setdefault((a.nbytes, a.shape, a.dtype, a.category, a.op, any_layer(a.module)), []).append(a)
    largest = list(alike.values())[:LARGEST]
    size = one_unit((some[0].nbytes for some in largest), units)
    for some in largest:
        a = some[0]
        shape = " × ".join(f"{n:,}" for n in a.shape)
        times = f"{len(some)} × " if len(some) > 1 else ""
        cells = times + size(a.nbytes), f"{shape} {NARROW.get(a.dtype, a.dtype)}"
        several = len({one.module for one in some}) > 1
        module = (any_layer(a.module) if several else a.module).removeprefix("model.") or "the model"
        if wide:
            table.add_row(*cells, a.category, Text(module), a.op)
        else:
            table.add_row(*cells)
            table.add_row("", Text(f"{a.category}, {module}: {a.op}", "dim"))
    return table
