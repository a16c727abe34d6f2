"""The default model of `logitless align`: what `logitless train` writes without options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accelerate import PartialState
from rich.console import Console

from .align_config import DEFAULT_MODEL
from .config import TrainConfig
from .progress import say
from .rundir import RUN_FILE, stored
from .sft import run as train_text


def default_model(model: str, device: str, console: Console) -> None:
    """Trains the default model, where it is the one that is asked for, and nobody has trained it yet."""
    place = Path(DEFAULT_MODEL).parent
    if model != DEFAULT_MODEL or Path(DEFAULT_MODEL, "config.json").exists():
        return
    say(console, f"no model at {DEFAULT_MODEL} yet: training it first (logitless train), 2.5 minutes ...")
    begun = (place / RUN_FILE).exists()
    started = replace(stored(place, TrainConfig()), resume=place) if begun else TrainConfig(output_dir=place)
    train_text(replace(started, device=device), console)
    PartialState().wait_for_everyone()
