"""What runs write into their directories, by name: no output replaces it, and a new run finds none of it there."""

from __future__ import annotations

from .lock import LOCK_FILE

RUN_FILE = "run.json"  # what makes a directory a run's
SUMMARY_FILE, METRICS_FILE = "summary.json", "metrics.jsonl"
TABLES = (METRICS_FILE, SUMMARY_FILE, "step_memory.json", "completions.json")
PICTURES = ("loss.png", "memory.png", "align.png", "comparison.png", "comparison.html")
# What a run prepares before its first step, and goes on with when it is resumed.
TOKENS_FILE, ROWS_FILE, PROMPTS_FILE, REWARD = PREPARED = ("tokens.npz", "rows.jsonl", "prompts.jsonl", "reward")
WRITTEN = (*PREPARED, *TABLES, *PICTURES, "model", "adapter", "checkpoint-*")
OWN = (*WRITTEN, RUN_FILE, LOCK_FILE)
