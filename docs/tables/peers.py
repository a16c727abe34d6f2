"""The table of `docs/peers.md`, from what `make test-peers` counted."""

import json
from pathlib import Path

from docs.tables.shared import grid

RESULTS = Path(__file__).parents[2] / "tests" / "peers" / "results.json"
NAMES = {
    "liger": "Liger-Kernel",
    "cut_cross_entropy": "cut-cross-entropy",
    "quack": "QuACK",
    "opinfo": "torch's OpInfo",
    "verl": "verl",
    "fla": "flash-linear-attention",
    "prime_rl": "prime-rl",
    "torchtune": "torchtune",
    "trl": "TRL",
}


def peers(results: Path = RESULTS) -> str:
    """How many cases of each peer held, and the sums."""
    found = json.loads(results.read_text("utf-8"))
    head = [
        "project",
        "version",
        "cases against dense float64",
        "cases against its own function",
        "failed",
    ]
    columns = "dense float64", "own function", "failed"
    rows = [
        [
            name,
            found[peer]["version"] or "not installed",
            *(f"{found[peer].get(column, 0):,}" for column in columns),
        ]
        for peer, name in NAMES.items()
    ]
    sums = [f"{sum(counts.get(column, 0) for counts in found.values()):,}" for column in columns]
    return grid(head, [*rows, ["**all**", "", *(f"**{x}**" for x in sums)]])
