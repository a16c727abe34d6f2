"""What tables of several pages share."""

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def grid(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(records: list[dict[str, Any]]) -> str:
    """What was measured on, and when."""
    env = records[0]
    threads = f"{env['threads']} thread{'s' * (env['threads'] != 1)}"
    return f"{env['cpu']}, {threads}, torch {env['versions']['torch']}, {env['date'][:10]}."
