"""A Trainer whose weights or sequences are divided among ranks, with torch's distributed checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import AutocastKwargs, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import Trainer

from ...models.tensor_parallel import split_matrices
from .mesh import TENSOR, Layout

STATE, SCHEDULE = "sharded_state", "scheduler.pt"


class ShardedTrainer(Trainer):
    """FSDP2 (torch's `fully_shard`, as accelerate applies it) and tensor parallelism, on processors too.

    With FSDP2 each decoder layer is a unit, the last norm and the head another. A checkpoint holds each parameter
    once, in torch.distributed.checkpoint's format, and is read back by any layout of any number of ranks.
    layout, mesh: which ranks share what, and the same as `device_mesh` gives it; other arguments: Trainer's.
    """

    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, layout: Layout, mesh: Any, **kwargs: Any) -> None:
        self.layout, self.mesh = layout, mesh
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if self.mesh is not None:  # by which data loaders know whose sequences are the same
            state.device_mesh = self.mesh
            state.parallelism_config = ParallelismConfig(dp_shard_size=self.layout.weights)
            if self.layout.tensor > 1:  # before the optimizer exists, and before a device would hold the whole model
                split_matrices(self.model, self.mesh[TENSOR])
        if self.layout.fsdp and self.layout.weights > 1:
            # accelerate itself asks for a GPU
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp2_plugin(self.model)
            # autocast's cache would keep a rounded copy of every gathered weight until the forward pass ends
            self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
            self.is_fsdp_enabled = True

    def get_tp_size(self) -> int:
        return self.layout.tensor

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # Prepared already: DDP would refuse parameters that are DTensors. Said no sooner, since Trainer refuses to keep
        # checkpoints of models that were split when it was made.
        self.is_distributed_loading_by_transformers = self.layout.tensor > 1 and not self.is_fsdp_enabled
        found = super()._prepare_for_training(*args, **kwargs)
        if self.is_fsdp_enabled and self.args.bf16:  # accelerate puts autocast around all others
            self.model.forward = self.accelerator.autocast()(self.model.forward)
        return found

    def _clip_grad_norm(self, model: Any) -> Any:
        """Makes the sums over ranks that are due, once rather than in each operation of norm and optimizer."""
        for x in model.parameters():
            if isinstance(x.grad, DTensor) and x.grad.placements != x.placements:
                x.grad = x.grad.redistribute(placements=x.placements)
        return super()._clip_grad_norm(model)

    def whole_weights(self) -> dict[str, Any]:
        """The model's weights, gathered on the first rank; nothing on the others."""
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A checkpoint's weights lie beside its optimizer state, and a run saves its model itself."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with checkpointing():
            save({**self._model_state(), **self._optimizer_state()}, checkpoint_id=Path(output_dir) / STATE)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULE)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # what is written next says that the checkpoint is whole

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        state = self._model_state()
        with checkpointing():
            load(state, checkpoint_id=Path(resume_from_checkpoint) / STATE)
        set_model_state_dict(self.model, state["model"], options=self._options)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        place, found = Path(checkpoint) / STATE, self._optimizer_state()["optimizer"]
        saved = {path[:3] for path in FileSystemReader(place).read_metadata().planner_data.values()}
        # a parameter that has had no gradient, as of a tower of images that sees none, has no state
        found["state"] = {name: x for name, x in found["state"].items() if ("optimizer", "state", name) in saved}
        with checkpointing():
            load({"optimizer": found}, checkpoint_id=place)
        options = replace(self._options, strict=False)
        set_optimizer_state_dict(self.model, self.optimizer, found, options=options)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULE, weights_only=True))

    @property
    def _options(self) -> StateDictOptions:
        frozen = any(not p.requires_grad for p in self.model.parameters())
        return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)

    def _model_state(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self.model, options=self._options)}

    def _optimizer_state(self) -> dict[str, Any]:
        return {"optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=self._options)}


def fsdp2_plugin(model: Any) -> FullyShardedDataParallelPlugin:
    """FSDP2 with each layer a unit: those that the model's class names and this one has, which may be without some."""
    classes = {type(module).__name__ for module in model.modules()}
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted(classes.intersection(model._no_split_modules or ())),
    )


@contextmanager
def checkpointing() -> Iterator[None]:
    """What fails on a rank is raised as it is, and one process, a run of which has no group, is not warned of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:  # not an Exception itself
            raise next(iter(error.failures.values()))[0] from None
