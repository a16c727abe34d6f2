"""What a checkpoint gives back to a run, held against what the run has: nothing in it is taken on trust."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from ..sources.model import check_complete, check_used, few
from .checkpoints import readable

MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # what AdamW, which all runs use, keeps of a parameter
Names = Mapping[Tensor, str]


def refuse_incomplete(trainer: Any) -> None:
    """Has a trainer raise ConfigError where a checkpoint lacks weights or has others, of which Trainer only warns."""

    def refuse(found: Any) -> None:
        tied = getattr(trainer.model, "all_tied_weights_keys", {})
        check_complete(f"--resume {trainer.args.output_dir}", set(found.missing_keys) - set(tied))
        check_used(f"--resume {trainer.args.output_dir}", found.unexpected_keys, trainer.model)

    trainer._issue_warnings_after_load = refuse


def guard_loading(trainer: Any, checkpoint: Path) -> TrainerState:
    """DataError where a checkpoint holds something else than was saved, in the place of whatever its parts raise.

    Returns where it stands.
    """
    with readable(checkpoint):
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        _check_alike("trainer_state.json", vars(state), {**vars(TrainerState()), "train_batch_size": 0})
        if not 0 <= state.epoch <= state.global_step:
            raise ValueError(f"trainer_state.json: epoch {state.epoch} at step {state.global_step}")
        _check_adapter(trainer, checkpoint / "adapter_model.safetensors")
    for name in ("_load_from_checkpoint", "_load_rng_state"):
        setattr(trainer, name, readable(checkpoint)(getattr(trainer, name)))
    load = trainer._load_optimizer_and_scheduler

    def load_checked(place: str | None) -> None:
        with readable(checkpoint):
            before = trainer.lr_scheduler.state_dict()
            load(place)
            after = trainer.lr_scheduler.state_dict()
            _check_alike("scheduler.pt", after, before)
            if after["last_epoch"] != state.global_step:
                raise ValueError(f"scheduler.pt: step {after['last_epoch']}, expected {state.global_step}")
            names = {p: name for name, p in trainer.model.named_parameters() if p.requires_grad}
            check_moments(trainer.optimizer, names)
            trainer.add_callback(_Unmoved(checkpoint, set(names) - set(trainer.optimizer.state), names))

    trainer._load_optimizer_and_scheduler = load_checked
    return state


def check_moments(optimizer: Any, names: Names, changing: Collection[str] = ("lr", "weight_decay")) -> None:
    """ValueError, which names what is wrong, unless a loaded optimizer has AdamW's state of its parameters.

    changing: options that may differ from those that the optimizer was made with.
    """
    if not optimizer.state:
        raise ValueError("optimizer.pt has no state")
    for p, state in optimizer.state.items():
        for key in MOMENTS:
            value = state.get(key)
            shape = torch.Size() if key == "step" else p.shape
            if not isinstance(value, Tensor) or value.shape != shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                name = names.get(p, "a parameter")
                raise ValueError(f"optimizer.pt: {key} of {name}: expected shape {tuple(shape)}, got {got}")
        if not state["step"] >= 0:
            raise ValueError(f"optimizer.pt: step {state['step'].item():g}, expected none below 0")
    for group in optimizer.param_groups:
        _check_alike("optimizer.pt", group, {"lr": 0.0, "weight_decay": 0.0})
        for name, own in optimizer.defaults.items():
            if name in group and name not in changing and group[name] != own:
                raise ValueError(f"optimizer.pt: {name}: expected {own}, got {group[name]}")


class _Unmoved(TrainerCallback):
    """DataError for a parameter that the checkpoint has no state of, and that learns: those that never do have none."""

    def __init__(self, checkpoint: Path, parameters: Iterable[Tensor], names: Names) -> None:
        self.checkpoint, self.parameters, self.names = checkpoint, list(parameters), names

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        lost = [self.names[p] for p in self.parameters if p.grad is not None]
        self.parameters = []
        if lost:
            with readable(self.checkpoint):
                raise ValueError(f"optimizer.pt has no state of {few(lost)}")


def _check_alike(where: str, found: Any, expected: Any) -> None:
    """ValueError unless values are of the same kinds, within lists and tables too where something is expected there."""
    numbers = [isinstance(x, int | float) and not isinstance(x, bool) for x in (found, expected)]
    lists = [isinstance(x, list | tuple) for x in (found, expected)]
    if expected is None or all(numbers):
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        for name, value in expected.items():
            _check_alike(f"{where}: {name}", found.get(name), value)
    elif all(lists):
        if expected and len(found) != len(expected):
            raise ValueError(f"{where}: expected {len(expected)} values, got {len(found)}")
        for one, other in zip(found, expected, strict=False):
            _check_alike(where, one, other)
    elif type(found) is not type(expected):
        kind = "a number" if numbers[1] else type(expected).__name__
        raise ValueError(f"{where}: expected {kind}, got {type(found).__name__}")


def _check_adapter(trainer: Any, saved: Path) -> None:
    """ConfigError where a saved adapter lacks tensors, of which PEFT only warns."""
    if not saved.exists():
        return
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(saved, framework="np") as file:
        missing = set(get_peft_model_state_dict(trainer.model)) - set(file.keys())
    check_complete(f"--resume {trainer.args.output_dir}", missing, "adapter_config.json")
