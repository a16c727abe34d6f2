"""Ratios between methods of one case and run: times the fastest bare products, and times plain torch."""

from typing import Any

Record = dict[str, Any]


def fastest_floor(records: list[Record]) -> Record | None:
    """The bare products that took the least time in this run, whatever order they go in."""
    floors = [r for r in records if r["method_kind"] == "floor" and r["status"] == "ok"]
    return min(floors, key=lambda r: min(r["seconds"]), default=None)


def add_ratios(records: list[Record]) -> None:
    """The least seconds of the rounds, over those of the fastest bare products and of plain torch; and each round's."""
    running = [r for r in records if r["status"] == "ok"]
    plain = next((r for r in running if r["method"] == "torch"), None)
    for record in running:
        seconds = record["seconds"]
        record["least_s"], record["most_s"] = min(seconds), max(seconds)
        for key, base in (("to_bare", fastest_floor(records)), ("to_torch", plain)):
            if base is not None:
                ratios = [a / b for a, b in zip(seconds, base["seconds"], strict=False)]  # far behind: one round
                record[key], record[f"{key}_spread"] = min(seconds) / min(base["seconds"]), [min(ratios), max(ratios)]
