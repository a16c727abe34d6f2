"""Scoring, decoding and generating with records."""

from typing import Any

from bench.sampling.run import table
from docs.tables.shared import machine

Record = dict[str, Any]


def sampling(records: list[Record]) -> str:
    """A table for each part, the last one measured, with its machine and day."""
    latest = {r["kind"]: r for r in records}
    return "\n\n".join(f"{table(r)}\n\n{_quiet(r)}" for r in latest.values())


def _quiet(r: Record) -> str:
    """The machine, and how much of it others took."""
    busy = max(
        (max(way["others"]) for way in r["ways"].values() if way.get("others")), default=None
    )
    others = "" if busy is None else f" Other processes took up to {busy:.0%} of it."
    return machine([r["environment"]]) + others
