"""What runs write into their directories, by name: no output replaces it, and a new run finds none of it there.

And by how it begins: what results replace, as their like, and what is no text.
"""

from __future__ import annotations

from pathlib import Path

from .lock import LOCK_FILE

RUN_FILE = "run.json"  # what makes a directory a run's
SUMMARY_FILE, METRICS_FILE = "summary.json", "metrics.jsonl"
TABLES = (METRICS_FILE, SUMMARY_FILE, "step_memory.json", "completions.json")
PICTURES = ("loss.png", "memory.png", "align.png", "comparison.png", "comparison.html")
# What a run prepares before its first step, and goes on with when it is resumed.
TOKENS_FILE, ROWS_FILE, PROMPTS_FILE, REWARD = PREPARED = ("tokens.npz", "rows.jsonl", "prompts.jsonl", "reward")
WRITTEN = (*PREPARED, *TABLES, *PICTURES, "model", "adapter", "checkpoint-*")
OWN = (*WRITTEN, RUN_FILE, LOCK_FILE)
RESULTS = (b'{\n  "schema": ', b'{"document": 0, "name": ')


def is_result(path: Path) -> bool:
    """Whether a file begins as what --json and --documents write, and run.json."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).startswith(RESULTS)


def marks_a_run(path: Path) -> bool:
    """Whether a file makes its directory a run's: the lock, or run.json, and not what else is called so."""
    return path.name == LOCK_FILE or (path.name == RUN_FILE and is_result(path))
