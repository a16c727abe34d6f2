"""Log-probs of logits that exist: each method's time and memory."""

import operator
from typing import Any

from docs.tables.shared import grid, machine

Record = dict[str, Any]


def logits(records: list[Record]) -> str:
    """Time and memory of log-probs from logits that exist, times the dense method, a table for each dtype."""
    batch, length, vocab = records[0]["shape"]
    found = [r for r in records[1:] if r["status"] == "ok"]
    parts = []
    for dtype in dict.fromkeys(r["dtype"] for r in found):
        some = [r for r in found if r["dtype"] == dtype]
        dense = next((r for r in some if r["method"] == "dense"), some[0])
        copy = batch * length * vocab * (2 if dtype == "bf16" else 4) / 1e6
        title = f"**{dtype} logits**, B={batch}, L={length:,}, V={vocab:,}: {copy:,.0f} MB"
        parts.append(title + "\n\n" + grid(_LOGITS_HEAD, [_logits_row(r, dense) for r in some]))
    return "\n\n".join(
        [*parts, _guidance(found), f"{machine(records)} Memory is above the logits themselves."]
    )


_LOGITS_HEAD = [
    "method",
    "forward",
    "× dense",
    "with backward",
    "× dense",
    "forward peak",
    "kept for backward",
    "peak with backward",
    "error (nat)",
]


def _logits_row(r: Record, dense: Record) -> list[str]:
    cells = [r["method"]]
    for key in ("forward_s_median", "step_s_median"):
        cells += [f"{r[key]:.2f} s", f"{r[key] / dense[key]:.2f}"]
    cells += [f"{r[key]:,.0f} MB" for key in ("forward_peak_mb", "kept_mb", "step_peak_mb")]
    return [*cells, f"{r['value_error']:.0e}"]


def _guidance(found: list[Record]) -> str:
    """Which of ours was best at what, from the same records."""
    lines = []
    for dtype in dict.fromkeys(r["dtype"] for r in found):
        ours = [r for r in found if r["dtype"] == dtype and not r["method"].startswith("tutorial")]
        keys = ("forward_s_median", "step_s_median", "forward_peak_mb", "step_peak_mb")
        best = [f"`{min(ours, key=operator.itemgetter(key))['method']}`" for key in keys]
        lines.append(
            f"- {dtype}: fastest without gradient {best[0]}, with backward {best[1]}; "
            f"least memory without gradient {best[2]}, with backward {best[3]}."
        )
    return "\n".join(lines)
