"""Ratios between methods of one case and run: times the fastest bare products, and times plain torch."""

import statistics
from typing import Any

Record = dict[str, Any]


def fastest_floor(records: list[Record]) -> Record | None:
    """The bare products that took the least time in this run, whatever order they go in."""
    floors = [r for r in records if r["method_kind"] == "floor" and r["status"] == "ok"]
    return min(floors, key=lambda r: statistics.median(r["seconds"]), default=None)


def add_ratios(records: list[Record]) -> None:
    """Medians and spreads, and per-round ratios to the fastest bare products and to plain torch, from the seconds."""
    running = [r for r in records if r["status"] == "ok"]
    plain = next((r for r in running if r["method"] == "torch"), None)
    for record in running:
        seconds = record["seconds"]
        record["median_s"], record["spread_s"] = statistics.median(seconds), [min(seconds), max(seconds)]
        for key, base in (("to_bare", fastest_floor(records)), ("to_torch", plain)):
            if base is not None:
                rounds = min(len(seconds), len(base["seconds"]))  # a long call has the first one alone
                ratios = [seconds[i] / base["seconds"][i] for i in range(rounds)]
                record[key], record[f"{key}_spread"] = statistics.median(ratios), [min(ratios), max(ratios)]
