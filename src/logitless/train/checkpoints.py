"""Checkpoints of a run: which are whole, and which a killed process left unfinished."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

# Trainer writes this file last, so a directory whose copy of it reads well is whole.
_LAST_FILE = "trainer_state.json"


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [(step, path) for path in run.glob("checkpoint-*") if (step := _step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def last_checkpoint(run: Path) -> tuple[Path, int] | None:
    """The newest whole checkpoint and its step."""
    whole = checkpoints(run)
    return (whole[-1], _step_of(whole[-1]) or 0) if whole else None


def discard_unfinished(run: Path) -> None:
    """Removes checkpoint directories that were never finished; they only take space."""
    for path in run.glob("checkpoint-*"):
        if path.is_dir() and _step_of(path) is None:
            shutil.rmtree(path)


def _step_of(checkpoint: Path) -> int | None:
    try:
        state = json.loads((checkpoint / _LAST_FILE).read_text(encoding="utf-8"))
        return int(state["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
