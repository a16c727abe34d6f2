"""What a checkpoint gives back to a run: all that was saved, or one line that says why not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...integrations.transformers.lm_head import replaced
from ..sources.model import check_complete, check_used
from .checkpoints import readable


def saving_as_trained(model: Any) -> AbstractContextManager[None]:
    """While it lasts, a model saves the tensors that it has, as Trainer reads them from a checkpoint.

    Files to be used have others, such as each expert's own; so has what the run saves in the end.
    """
    if not isinstance(model, PreTrainedModel):  # adapters, which PEFT saves
        return nullcontext()
    return replaced(model, "save_pretrained", partial(model.save_pretrained, save_original_format=False))


def refuse_incomplete(trainer: Any) -> None:
    """Has a trainer raise ConfigError where a checkpoint lacks weights or has others, of which Trainer only warns."""

    def refuse(found: Any) -> None:
        tied = getattr(trainer.model, "all_tied_weights_keys", {})
        check_complete(f"--resume {trainer.args.output_dir}", set(found.missing_keys) - set(tied))
        check_used(f"--resume {trainer.args.output_dir}", found.unexpected_keys, trainer.model)

    trainer._issue_warnings_after_load = refuse


class ByItsOptions(TrainerCallback):
    """Has a run that takes more steps than before its checkpoint go by these from its first step on.

    Trainer restores how often checkpoints were made, and until the schedule's next step the rate.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        state.save_steps = int(args.save_steps)
        rates = [
            rate * curve(lr_scheduler.last_epoch)
            for rate, curve in zip(lr_scheduler.base_lrs, lr_scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        lr_scheduler._last_lr = rates


def guard_loading(trainer: Any, checkpoint: Path) -> TrainerState:
    """Has a trainer raise DataError in the place of whatever loading a checkpoint raises, as of other libraries.

    Returns where it stands.
    """
    trainer.add_callback(ByItsOptions())
    for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"):
        setattr(trainer, name, readable(checkpoint)(getattr(trainer, name)))
    with readable(checkpoint):
        return TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
