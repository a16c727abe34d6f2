"""Checkpoints of a run: which are whole, and which a killed process left unfinished."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from zipfile import is_zipfile

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


def damaged_file(checkpoint: Path) -> Path | None:
    """A file of a whole checkpoint that has since been cut short, by what its format says of its length."""
    return next((path for path in sorted(checkpoint.iterdir()) if _is_cut_short(path)), None)


def discard_unfinished(run: Path) -> None:
    """Removes checkpoint directories that were never finished; they only take space."""
    for path in run.glob("checkpoint-*"):
        if path.is_dir() and _step_of(path) is None:
            shutil.rmtree(path)


def _is_cut_short(path: Path) -> bool:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open  # options are read where it is not installed, too

        try:
            with safe_open(path, framework="np"):
                return False
        except (OSError, SafetensorError):
            return True
    return path.suffix in (".pt", ".pth", ".bin") and not is_zipfile(path)  # what torch.save writes


def _step_of(checkpoint: Path) -> int | None:
    try:
        state = json.loads((checkpoint / _LAST_FILE).read_text(encoding="utf-8"))
        return int(state["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
