"""A whole training step on a CPU, and which slices it computes fastest."""

import statistics
from typing import Any

from docs.tables.shared import grid, machine

Record = dict[str, Any]


def train_step(records: list[Record]) -> str:
    """Seconds of a whole step by each method, with the last ones measured of new and of kept memory."""
    last = {r["freed_memory"]: r for r in records}
    rows = []
    for memory, of in {
        "new at each step": last["fresh"],
        "of the step before": last["kept"],
    }.items():
        for method, seconds in of["seconds"].items():
            ratio = statistics.median(
                a / b for a, b in zip(seconds, of["seconds"]["dense"], strict=True)
            )
            spread = f"{statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"
            rows.append([memory, method, spread, f"{ratio:.2f}"])
    kept = last["kept"]
    shape = "{tokens:,} tokens, V={vocabulary:,}, H={hidden:,}".format(**kept["shape"])
    busy = max(r["others"] for r in last.values())
    return (
        f"{grid(['memory', 'loss', 'a step', '× dense'], rows)}\n\n{shape}; medians of "
        f"{len(kept['seconds']['dense'])} rounds in turn. {machine([kept])} Other processes took up to {busy:.0%} "
        "of the machine."
    )


def slices(records: list[Record]) -> str:
    """Times of sizes of slices over those of the pass's own, a grid for each piece of work."""
    env, rows = records[0], records[1:]
    parts = []
    for case, title in (("entropy", "Log-prob and entropy"), ("loss", "Loss and gradients")):
        of = {tuple(r["size"]): r for r in rows if r["case"] == case}
        own = tuple(next(iter(of.values()))["own"])
        across = list(dict.fromkeys(b for _, b in of))
        cells = [
            [
                f"{a:,}",
                *(_bold(of[a, b]["seconds"] / of[own]["seconds"], (a, b) == own) for b in across),
            ]
            for a in dict.fromkeys(a for a, _ in of)
        ]
        what = {"entropy": "logits of a tile", "loss": "entries at a time of whole rows"}[case]
        parts.append(
            f"**{title}**\n\n{grid([f'tokens; {what}', *(f'{b:,}' for b in across)], cells)}"
        )
    shape = "N={:,} H={:,} V={:,}".format(*env["shape"])
    held = ", ".join(f"{level} {size}" for level, size in env["caches"].items())
    busy = max(r["others"] for r in rows)
    return "\n\n".join(
        [
            *parts,
            f"{shape}, caches {held}. {machine(records)} Other processes took up to {busy:.0%} of the machine.",
        ]
    )


def _bold(ratio: float, own: bool) -> str:
    return f"**{ratio:.2f}**" if own else f"{ratio:.2f}"
