"""What runs write into their directories, by name: no output replaces it, and a new run finds none of it there.

A file's first bytes tell whether it is a result, which a new one may replace, or marks a folder of what is no text.
"""

from __future__ import annotations

import re
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
START = "start"  # what the default model begins from, beside its run.json
PARTS_MANIFEST = "manifest.json"  # what makes a folder the parts of an unfinished score
RESULTS = re.compile(rb'{\n  "schema": \d|{"document": 0, "name": ')
HELD = re.compile(rb"process \d")  # how a lock begins


def is_result(path: Path) -> bool:
    """Whether a file begins as what --json and --documents write, run.json and the manifest of parts."""
    return path.is_file() and RESULTS.match(_beginning(path)) is not None


def no_text_beside(path: Path) -> tuple[str, ...]:
    """What holds no text in this file's folder, by name: where it is a run's lock or run.json, or a manifest of parts.

    Another file that is called so marks nothing.
    """
    if path.name == PARTS_MANIFEST:
        return ("*",) if path.parent.name.endswith(".parts") and is_result(path) else ()
    if path.name == RUN_FILE:
        return (*OWN, START) if is_result(path) else ()
    return OWN if path.name == LOCK_FILE and HELD.match(_beginning(path)) else ()


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except FileNotFoundError:  # a lock that was given back meanwhile
        return b""
