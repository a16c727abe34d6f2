"""Pretrained models on a machine without a GPU."""

from statistics import median
from typing import Any

from docs.tables.shared import grid, machine

Record = dict[str, Any]
GIB = 1 << 30


def gemma(records: list[Record]) -> str:
    """The peak of each training run, and its middle step."""
    head = ["loss", "tokens a step", "logits", "steps", "peak", "a step"]
    rows = [
        [
            r["loss"],
            f"{r['tokens']:,}",
            f"{r['logits_bytes'] / GIB:.0f} GiB",
            str(r["steps"]),
            f"{r['peak_resident_bytes'] / GIB:.1f} GiB",
            r.get("failed") or f"{median(r['step_seconds']):.0f} s",
        ]
        for r in records[1:]
    ]
    return f"{grid(head, rows)}\n\n{machine(records)}"
