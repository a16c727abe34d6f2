"""What a checkpoint gives back to a run: all that was saved, or one line that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerState

from ..sources.model import check_complete, check_used
from .checkpoints import readable


def refuse_incomplete(trainer: Any) -> None:
    """Has a trainer raise ConfigError where a checkpoint lacks weights or has others, of which Trainer only warns."""

    def refuse(found: Any) -> None:
        tied = getattr(trainer.model, "all_tied_weights_keys", {})
        check_complete(f"--resume {trainer.args.output_dir}", set(found.missing_keys) - set(tied))
        check_used(f"--resume {trainer.args.output_dir}", found.unexpected_keys, trainer.model)

    trainer._issue_warnings_after_load = refuse


def guard_loading(trainer: Any, checkpoint: Path) -> TrainerState:
    """Has a trainer raise DataError in the place of whatever loading a checkpoint raises, as of other libraries.

    Returns where it stands.
    """
    for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"):
        setattr(trainer, name, readable(checkpoint)(getattr(trainer, name)))
    with readable(checkpoint):
        return TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
