"""What a run of alignment on soft tokens starts from: policy, reward, prompts."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..errors import ConfigError, DeviceError, OptionError
from ..memory.resident import reset_peak
from .default_model import default_model
from .files import read_lines, write_lines, write_whole
from .grade_config import GradeConfig
from .grade_data import prompts_of, saved_classifier, texts_of, train_classifier
from .grade_methods import method_of
from .grade_models import SoftReward, shared_vocabulary
from .grade_run import Run, restore
from .grade_step import Task
from .model import ModelSource, align_tokens, build, load_tokenizer, resolve, resolve_trained
from .progress import say
from .rundir import record
from .tokenizer import TextTokenizer

PROMPTS_FILE, REWARD = "prompts.jsonl", "reward"


def policy_of(config: GradeConfig, console: Console) -> tuple[ModelSource, TextTokenizer]:
    """The model to align and its tokenizer; the default one is trained first. Raises LogitlessError for bad input."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError(
            f"--method {config.method} runs on one device: start it without torchrun or accelerate launch"
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--device cuda: this torch sees no GPU; use --device cpu or auto")
    default_model(config.model, config.device, console)
    source = resolve_trained(config.model, "align")
    if config.top_k > source.vocab_size:
        raise OptionError(f"--top-k {config.top_k}: {config.model} has a vocabulary of {source.vocab_size:,}")
    return source, load_tokenizer(source)


def materials(config: GradeConfig, place: Path, model: Any, tokenizer: TextTokenizer, console: Console) -> None:
    """prompts.jsonl, and reward/ where no reward model is named, unless they lie there already."""
    wants_prompts = not (place / PROMPTS_FILE).exists()
    wants_reward = config.reward_model is None and not (place / REWARD).exists()
    texts = texts_of(config.data) if wants_prompts or wants_reward else None
    if texts is not None and wants_reward:
        learned = texts.reward or texts_of(None).reward
        say(console, "training the reward: prose against code, on files that no prompt comes from ...")
        base = model.get_base_model() if config.lora_rank else model
        found, accuracy = train_classifier(base, learned, tokenizer, config.seed, config.completion_length)
        say(console, f"it is right about {accuracy:.0%} of passages of files that it never saw")
        write_whole(place / REWARD, lambda path: saved_classifier(path, found, tokenizer))
    if texts is not None and wants_prompts:
        found = prompts_of(config, texts, tokenizer)
        write_lines(place / PROMPTS_FILE, [{"split": name, "ids": x} for name, rows in found.items() for x in rows])


def set_up(config: GradeConfig, place: Path, source: ModelSource, tokenizer: TextTokenizer, console: Console) -> Run:
    """A run, new or as it was left."""
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    model = build(config, source).to(device).eval()  # dropout would differ between the passes of one step
    align_tokens(model, tokenizer)
    materials(config, place, model, tokenizer, console)
    reward = _reward_model(config.reward_model or str(place / REWARD))
    theirs = tokenizer if config.reward_model is None else load_tokenizer(resolve(config.reward_model))
    vocab_size = shared_vocabulary(model, reward, tokenizer.saved, theirs.saved)
    rows = read_lines(place / PROMPTS_FILE)
    prompts = {name: [row["ids"] for row in rows if row["split"] == name] for name in ("train", "validation", "test")}
    frozen = None if config.lora_rank else copy.deepcopy(model).requires_grad_(False)
    soft = SoftReward.of(reward.to(device), vocab_size, config.reward_label)
    method = method_of(Task(config, model, frozen, soft, vocab_size, tokenizer.eos_id))
    leaves = [*(p for p in model.parameters() if p.requires_grad), *method.parameters()]
    optimizer = torch.optim.AdamW(leaves, lr=config.rate, weight_decay=0.0)
    state = Run(config, place, method, tokenizer, prompts, optimizer, console)
    record(config, place)
    reset_peak(device)
    restore(state)
    return state


def _reward_model(name: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    try:
        return AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"--reward-model {name}: {' '.join(str(error).split())[:300]}") from None
