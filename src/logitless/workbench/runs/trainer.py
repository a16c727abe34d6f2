"""What every run tells transformers' Trainer, and how a trained model is saved."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from transformers import TrainingArguments

from ..common import say
from ..common.files import write_whole
from ..common.options import RunOptions
from ..sources.generation import align_tokens
from ..sources.model import ModelSource, build
from ..sources.tokenizer import TextTokenizer

CHECKPOINTS_PER_RUN, MOST_STEPS_BETWEEN = 4, 500
WARM_UP = 0.05  # of the steps


def quiet() -> None:
    """Leaves the console to the run: no warnings and progress bars of the libraries beneath it."""
    say.quiet()
    disable_progress_bars()
    # of how torch's own meshes are cut and its sums are sent, from every rank: nothing that a user could change
    warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def on_processors(config: RunOptions) -> bool:
    """Whether a run computes on processors: there ranks find each other only if accelerate is told so."""
    return config.device == "cpu" or (config.device == "auto" and not torch.accelerator.is_available())


def arguments(config: RunOptions, place: Path, rate: float, kind: type[Any] = TrainingArguments, **more: Any) -> Any:
    """What a trainer is told in every run; `more`: what `kind` adds to it or has in its place."""
    shared: dict[str, Any] = {
        "output_dir": str(place),
        "max_steps": config.max_steps,
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "learning_rate": rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": min(max(1, round(WARM_UP * config.max_steps)), config.max_steps - 1),  # one step learns
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # a loss that is not a number must show
        "save_steps": min(MOST_STEPS_BETWEEN, max(1, config.max_steps // CHECKPOINTS_PER_RUN)),
        "seed": config.seed,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": on_processors(config),
        "ddp_find_unused_parameters": True,  # Trainer has it False for checkpointed layers, in the form not used here
        "dataloader_pin_memory": config.device != "cpu" and torch.cuda.is_available(),
    }
    given = kind(**{**shared, **more})
    if given.n_gpu > 1:
        given._n_gpu = 1  # several GPUs are for a distributed launch, not for nn.DataParallel
    return given


def model_facts(model: Any) -> dict[str, Any]:
    """What a summary says of a model, before `save_model` merges its adapters into it."""
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "dtype": str(model.get_output_embeddings().weight.dtype).removeprefix("torch."),
    }


def gathered(
    config: RunOptions,
    source: ModelSource,
    tokenizer: TextTokenizer,
    weights: dict[str, Any],
    length: int | None = None,
) -> Any:
    """A new model of weights of which each rank had a share: the first rank alone cannot merge adapters of the old one.

    length: as `build` takes it.
    """
    model = build(config, source, length)
    align_tokens(model, tokenizer)
    model.load_state_dict(weights)
    return model


def save_model(
    place: Path, tokenizer: TextTokenizer, lora_rank: int, model: Any, weights: dict[str, Any] | None
) -> None:
    """model/: what `AutoModelForCausalLM.from_pretrained` loads, adapters merged in; adapter/: those alone."""
    model.config.use_cache = True  # Trainer turns it off for training; whoever generates wants it
    if weights is not None:  # gathered from ranks, a tied weight is no longer the same tensor
        tied = getattr(model, "all_tied_weights_keys", {})
        weights = {name: weight for name, weight in weights.items() if tied.get(name) not in weights}

    def save(path: Path) -> None:
        model.save_pretrained(path, state_dict=weights)
        tokenizer.saved.save_pretrained(path)

    if not lora_rank:
        return write_whole(place / "model", save)
    write_whole(place / "adapter", save)
    model, weights = model.merge_and_unload(), None
    write_whole(place / "model", save)
