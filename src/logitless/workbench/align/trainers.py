"""TRL's trainer for a method: its arguments, its data, and its fused head on our pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import TrainingArguments

from ...algebra.costs import dense_loss_bytes
from ...errors import DataError, OptionError
from ...models.nsa.options import saved_with_nsa
from ...models.nsa.saved import load_parameters
from ...units import plural
from ...versions import installing
from ..common.written import ROWS_FILE
from ..runs.trackers import check_tracker, project
from ..runs.trainer import arguments
from ..sources.corpus import Row, first_line
from ..sources.tokenizer import TextTokenizer, prompt_ids
from .config import AlignConfig
from .rewards import leave_out_unrewarded, rewards_of

# The name of the option changed within transformers 5.
CHECKPOINTING = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n))


@dataclass(frozen=True)
class Alignment:
    """A run's place and parts, once its input is known to be good."""

    config: AlignConfig
    place: Path
    tokenizer: TextTokenizer
    train: list[Row]
    held_out: list[Row]
    console: Console


def trainer_of(parts: Alignment, model: Any) -> Any:
    """The GRPOTrainer, RLOOTrainer or DPOTrainer of a run."""
    config, ranks = parts.config, PartialState().num_processes
    held_out, together = even_batches(len(parts.held_out), config.batch_size, ranks)
    shared = {
        "beta": config.kl_weight,
        "report_to": config.report_to,
        "project": project(config.report_to),
        "bf16": False if config.device == "cpu" else torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        CHECKPOINTING: False,  # `build` did it already
        "per_device_eval_batch_size": together,
        "run_name": parts.place.name,
    }
    data = {"train_dataset": _dataset(parts, parts.train), "eval_dataset": _dataset(parts, parts.held_out[:held_out])}
    made = _of_pairs if config.method == "dpo" else _of_rollouts
    with _reference_like_the_policy():
        trainer = made(parts, model, shared, data)
    trainer.create_model_card = lambda **_: None  # TRL's, beside each checkpoint: it names a model [None]
    return trainer


@contextmanager
def _reference_like_the_policy() -> Iterator[None]:
    """Has TRL load its reference by the class that loaded the policy, which config.json may not name, and with nsa."""
    from transformers import AutoModelForCausalLM
    from trl.trainer import dpo_trainer, grpo_trainer, rloo_trainer
    from trl.trainer.utils import create_model_from_path

    kind: Any = AutoModelForCausalLM

    def load(name: str, **options: Any) -> Any:
        model = create_model_from_path(name, kind, **options)
        return load_parameters(model, name, **options) if saved_with_nsa(model.config) else model

    with ExitStack() as patches:
        for module in (dpo_trainer, grpo_trainer, rloo_trainer):
            patches.enter_context(patch.object(module, "create_model_from_path", load))
        yield


def _of_rollouts(parts: Alignment, model: Any, shared: dict[str, Any], data: dict[str, Any]) -> Any:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer

    config = parts.config
    kind, trainer_kind = (RLOOConfig, RLOOTrainer) if config.method == "rloo" else (GRPOConfig, GRPOTrainer)
    functions, weights = zip(*rewards_of(config), strict=True)
    given = arguments(
        config,
        parts.place,
        config.rate,
        kind,
        num_generations=config.generations_per_prompt,
        num_generations_eval=1,
        max_completion_length=config.completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        min_p=config.min_p or None,
        reward_weights=list(weights),
        **shared,
    )
    chats = isinstance(parts.train[0]["prompt"], list)
    tokenizer = _with_markers(parts.tokenizer) if chats else parts.tokenizer.saved
    trainer = trainer_kind(model=model, reward_funcs=list(functions), args=given, processing_class=tokenizer, **data)
    functions[0].bind(trainer)
    if not chats:  # TRL would read markers in a text, and keep what the tokenizer puts behind it
        trainer._tokenize_prompts = lambda prompts: (prompt_ids(prompts, parts.tokenizer), None, {})
    leave_out_unrewarded(trainer, weights)
    return trainer


def _of_pairs(parts: Alignment, model: Any, shared: dict[str, Any], data: dict[str, Any]) -> Any:
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    config, ranks = parts.config, PartialState().num_processes
    # an epoch's last pairs would be filled up with its first ones, or weigh more in a step than those of whole batches
    whole = len(parts.train) >= config.batch_size * ranks and len(parts.held_out) >= ranks
    given = arguments(
        config, parts.place, config.rate, DPOConfig, max_length=None, dataloader_drop_last=whole, **shared
    )
    return DPOTrainer(model=model, args=given, processing_class=_with_markers(parts.tokenizer), **data)


def even_batches(rows: int, most: int, ranks: int) -> tuple[int, int]:
    """(how many held-out rows are measured, how many at a time): TRL averages over batches, which then weigh alike."""
    each = rows // ranks
    if not each:  # fewer than ranks, which are given some twice
        return rows, 1
    size = each // -(-each // most)
    return (each - each % size) * ranks, size


def _with_markers(tokenizer: TextTokenizer) -> Any:
    """A tokenizer that takes the end of text and a chat template's markers, which TRL writes as text, for tokens."""
    saved = copy.deepcopy(tokenizer.saved)
    saved.split_special_tokens = False
    return saved


def after_epochs(trainer: Any, passed: int) -> None:
    """Has a trainer of rollouts go on with the order of prompts that comes after the epochs that are passed.

    TRL draws an order whenever an epoch begins, and a resumed trainer would begin with the first epoch's.
    """
    sampler_of = trainer._get_train_sampler

    def sampler(*args: Any) -> Any:
        made = sampler_of(*args)
        for _ in range(passed):
            next(iter(made), None)  # draws one order
        return made

    trainer._get_train_sampler = sampler


def _dataset(parts: Alignment, rows: list[Row]) -> Any:
    """The rows with the columns of all of the run's, None where one lacks them: `datasets` takes the first row's."""
    from datasets import Dataset
    from pyarrow import ArrowException

    names = dict.fromkeys(name for row in (*parts.train, *parts.held_out) for name in row)
    try:
        return Dataset.from_list([{name: row.get(name) for name in names} for row in rows])
    except (ArrowException, TypeError, ValueError, OverflowError) as error:
        where = f"{parts.config.data_said}, in {parts.place / ROWS_FILE}"
        raise DataError(f"{where}: expected values of one kind in each column ({first_line(error)[:200]})") from None


def check_available(config: AlignConfig) -> None:
    """OptionError where TRL, the library that --report-to names, or one of --rewards is not there."""
    if find_spec("trl") is None:
        raise OptionError(f"logitless align needs trl: {installing('train,rl')}")
    check_tracker(config.report_to)
    if config.kind.rollouts:
        rewards_of(config)


def longest_pair(rows: Any) -> int:
    """Tokens of the longest sequence among a trainer's pairs, prompt and answer."""
    sides = zip(rows["prompt_ids"], rows["chosen_ids"], rows["rejected_ids"], strict=True)
    return max(len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected in sides)


def check_pairs(config: AlignConfig, longest: int, positions: int | None) -> None:
    """DataError where the longest sequence of the pairs goes beyond the model's positions; None: it has any."""
    if positions is not None and longest > positions:
        raise DataError(
            f"{config.data_said}: a prompt with its answer has {plural(longest, 'token')}, the "
            f"model {positions:,} positions: shorten it, or leave it out"
        )


def dense_bytes(config: AlignConfig, vocab_size: int, itemsize: int, longest: int) -> int:
    """What dense logits of one forward pass with gradient would need, with their log-softmax.

    The completions' logits for rollouts; every token's of chosen and rejected for pairs. longest: tokens of a
    completion, or of a pair's longer sequence.
    """
    sequences = config.batch_size * (1 if config.kind.rollouts else 2)
    return dense_loss_bytes(sequences * longest, vocab_size, itemsize)
