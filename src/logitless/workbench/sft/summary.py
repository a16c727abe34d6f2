"""The end of a run: its summary as data, as a table, and where everything lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from ...printable import on_one_line
from ...units import format_parameters, format_perplexity, one_unit, perplexity, plural
from ..common.tables import facts

SCHEMA = 1


def numbers(records: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last loss, held-out loss before and after, speed and peak memory from metrics.jsonl's records."""
    steps = [r for r in records if "loss" in r]
    held = [r["held_out_loss"] for r in records if "held_out_loss" in r]
    return {
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "held_out_loss_before": held[0] if held and records[0].get("step") == 0 else None,
        "held_out_loss_after": held[-1],
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "training_seconds": steps[-1]["seconds"],
        "tokens_per_second": median(r["tokens_per_second"] for r in steps),
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in steps),
    }


def show(summary: dict[str, Any], run: Path, console: Console) -> None:
    """The summary as a table for people, and the files that a run wrote."""
    files = [
        name for name in ("loss.png", "memory.png", "metrics.jsonl", "summary.json", "model") if (run / name).exists()
    ]
    console.print()
    size, steps = format_parameters(summary["parameters"]), plural(summary["steps"], "step")
    title = f"{on_one_line(summary['model'])}: {size}, {steps}"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(facts(_rows(summary)), highlight=False)
    console.print(f"in {on_one_line(str(run))}: {', '.join(files)}", highlight=False, soft_wrap=True, markup=False)


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    before, after = summary["held_out_loss_before"], summary["held_out_loss_after"]
    reached = f"{after:.3f} (perplexity {format_perplexity(perplexity(after))})"
    teacher = summary.get("teacher")
    step_memory = {} if teacher else summary["step_memory"]
    peaks = (found.get("peak_bytes", 0) for found in step_memory.values())
    size = one_unit((summary["peak_memory_bytes"], *peaks))
    return [
        *([] if teacher is None else [("teacher", _teacher(teacher))]),
        ("training loss", f"{summary['first_loss']:.3f} → {summary['last_loss']:.3f} nats per token"),
        ("held-out loss", f"{'?' if before is None else f'{before:.3f}'} → {reached}"),
        (
            "speed",
            f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['training_seconds']:.0f} s of training",
        ),
        ("loss method", "logitless" if teacher else _loss_method(summary["loss"], summary["tensor_parallel"])),
        ("peak memory", f"{size(summary['peak_memory_bytes'])}, the whole process"),
        *([] if teacher else _step_rows(step_memory, size)),
    ]


def _teacher(of: dict[str, Any]) -> str:
    """What was learned of it."""
    exact = of["stored"] == "hidden" and of["tail"] == "bucket"
    others = {"bucket": "as one", "decoupled": "decoupled", "tail-aware": "weighted by their mean"}[of["tail"]]
    what = "the whole vocabulary" if exact else f"its best entries, the others {others}"
    at = "" if of["temperature"] == 1 else f" at temperature {of['temperature']:g}"
    share = "" if of["weight"] == 1 else f", {of['weight']:g} of the loss beside the text's own"
    return f"{of['record']}: {of['loss']} KL over {what}{at}{share}"


def _loss_method(loss: dict[str, Any], ranks: int) -> str:
    asked = f"{loss['asked']} → " if loss["asked"] == "auto" else ""
    if ranks > 1:
        return f"{asked}{loss['method']}: the head is split over {ranks} ranks"
    kind = "threshold" if asked and loss["threshold_bytes"] != loss["memory_budget_bytes"] else "budget"
    needs, most = loss["logits_bytes"], loss["threshold_bytes" if kind == "threshold" else "memory_budget_bytes"]
    size, fits = one_unit((needs, most)), "fit" if needs <= most else "exceed"
    return f"{asked}{loss['method']}: logits of {size(needs)} {fits} the {kind} of {size(most)}"


def _step_rows(step_memory: dict[str, Any], size: Callable[[int], str]) -> list[tuple[str, str]]:
    """One step's forward and backward, above the model: measured in a process of its own."""
    rows = []
    for method, name in (("logitless", "one step, logitless"), ("dense", "one step, dense")):
        found = step_memory[method]
        if "peak_bytes" in found:
            text = f"+{size(found['peak_bytes'])} at the peak, loss {found['loss']:.5f}"
        else:
            text = f"not measured: {found['not_measured']}"
        rows.append((name, text))
    if all("peak_bytes" in found for found in step_memory.values()):
        ratio = step_memory["dense"]["peak_bytes"] / max(1, step_memory["logitless"]["peak_bytes"])
        rows.append(("", f"the dense loss takes {ratio:.1f} × the memory for the same step"))
    return rows
