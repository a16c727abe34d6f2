"""`run`: a policy aligned through soft tokens (or by REINFORCE, to compare), from a `GradeConfig` to a summary."""

from __future__ import annotations

import copy
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from ..errors import ConfigError, DeviceError, OptionError
from ..memory.resident import reset_peak
from ..memory.units import format_bytes
from .default_model import default_model
from .files import read_lines, write_json, write_lines, write_whole
from .grade_config import GradeConfig
from .grade_data import prompts_of, saved_classifier, texts_of, train_classifier
from .grade_methods import method_of
from .grade_models import SoftReward, shared_vocabulary
from .grade_run import Run, evaluation, restore, steps
from .grade_step import Task
from .model import ModelSource, align_tokens, build, load_tokenizer, resolve
from .progress import say
from .rundir import SUMMARY_FILE, claim, explained, record
from .sft import METRICS_FILE, quiet, save_model
from .tokenizer import TextTokenizer

SCHEMA = 1
PROMPTS_FILE = "prompts.jsonl"


def run(config: GradeConfig, console: Console | None = None) -> dict[str, Any]:
    """Aligns as `config` says and returns the summary, which also lies in the run's directory.

    Writes checkpoint-N (to resume from), model (weights as safetensors, tokenizer), prompts.jsonl, metrics.jsonl,
    summary.json, run.json, and where none is given, reward (the classifier). One device. Raises LogitlessError for bad
    input and Interrupted when asked to stop.
    """
    console = console or Console(stderr=True)
    quiet()
    config.check()
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--device cuda: this torch sees no GPU; use --device cpu or auto")
    default_model(config.model, config.device, console)
    source = resolve(config.model)
    if source.weights is None:
        raise ConfigError(f"--model {config.model} has no weights to align: train it first, with logitless train")
    tokenizer = load_tokenizer(source)
    place = claim(config, config.method)
    with explained(place, "align"):
        state = set_up(config, place, source, tokenizer, console)
        return _conclude(state, steps(state))


def set_up(config: GradeConfig, place: Path, source: ModelSource, tokenizer: TextTokenizer, console: Console) -> Run:
    """A run in a directory, as it stands there: models, prompts, optimiser. What is not there yet is made."""
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    if config.top_k > source.vocab_size:
        raise OptionError(f"--top-k {config.top_k}: {config.model} has a vocabulary of {source.vocab_size:,}")
    model = build(config, source).to(device).eval()  # dropout would differ between the passes of one step
    align_tokens(model, tokenizer)
    texts = texts_of(config.data)
    reward = _reward_model(config, place, model, tokenizer, texts.reward or texts_of(None).reward, console)
    theirs = tokenizer if config.reward_model is None else load_tokenizer(resolve(config.reward_model))
    vocab_size = shared_vocabulary(model, reward, tokenizer.saved, theirs.saved)
    if not (place / PROMPTS_FILE).exists():
        found = prompts_of(config, texts, tokenizer)
        write_lines(place / PROMPTS_FILE, [{"split": name, "ids": x} for name, rows in found.items() for x in rows])
        record(config, place)
    rows = read_lines(place / PROMPTS_FILE)
    prompts = {name: [row["ids"] for row in rows if row["split"] == name] for name in ("train", "validation", "test")}
    frozen = None if config.lora_rank else copy.deepcopy(model).requires_grad_(False)
    soft = SoftReward.of(reward.to(device), vocab_size, config.reward_label)
    task = Task(config, model, frozen, soft, vocab_size, tokenizer.eos_id)
    method = method_of(task)
    leaves = [*(p for p in model.parameters() if p.requires_grad), *method.parameters()]
    optimizer = torch.optim.AdamW(leaves, lr=config.rate, weight_decay=0.0)
    state = Run(config, place, method, tokenizer, prompts, optimizer, console)
    reset_peak(device)
    restore(state)
    return state


def _reward_model(
    config: GradeConfig, place: Path, model: Any, tokenizer: TextTokenizer, texts: list[str], console: Console
) -> Any:
    """The named classifier, or the embedded one, trained unless a resumed run has it already."""
    from transformers import AutoModelForSequenceClassification

    name = config.reward_model or str(place / "reward")
    if config.reward_model is None and not (place / "reward").exists():
        say(console, "training the reward: prose against code, on files that no prompt comes from ...")
        base = model.get_base_model() if config.lora_rank else model
        found, accuracy = train_classifier(base, texts, tokenizer, config.seed, config.completion_length)
        say(console, f"it is right about {accuracy:.0%} of passages of files that it never saw")
        write_whole(place / "reward", lambda path: saved_classifier(path, found, tokenizer))
    try:
        return AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"--reward-model {name}: {' '.join(str(error).split())[:300]}") from None


def _conclude(state: Run, before: dict[str, float]) -> dict[str, Any]:
    """Evaluates, saves the model and writes the summary."""
    config, place, model = state.config, state.place, state.task.model
    after, test = evaluation(state, "validation"), evaluation(state, "test")
    steps_taken = [x for x in read_lines(place / METRICS_FILE) if "train/reward" in x]
    last = steps_taken[-max(1, len(steps_taken) // 10) :]
    train_reward = fmean(x["train/reward"] for x in last)
    trainable = sum(p.numel() for p in state.trainable)
    parameters = sum(p.numel() for p in model.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    save_model(place, state.tokenizer, config.lora_rank, model, None)
    summary = {
        "schema": SCHEMA,
        "method": config.method,
        "model": config.model,
        "reward_model": config.reward_model or str(place / "reward"),
        "data": config.data or "stdlib",
        "prompts": {name: len(rows) for name, rows in state.prompts.items()},
        "parameters": parameters,
        "trainable_parameters": trainable,
        "vocab_size": state.task.vocab_size,
        "device": str(model.device),
        "dtype": dtype,
        "learning_rate": config.rate,
        "steps": state.step,
        "before": before,
        "after": {**after, **test},
        "train_reward": train_reward,
        "generalisation_gap": train_reward - test["test/reward_mean"],
        "seconds_per_step": fmean(x["seconds"] for x in steps_taken),
        "training_seconds": sum(x["seconds"] for x in steps_taken),
        "peak_memory_bytes": max(x["peak_memory_bytes"] for x in steps_taken),
        "coverage": fmean(x["coverage"] for x in steps_taken),
        "versions": {name: version(name) for name in ("logitless", "torch", "transformers", "peft")},
        "output_dir": str(place),
        "checkpoint": str(place / "model"),
    }
    write_json(place / SUMMARY_FILE, summary)
    return summary


def show(summary: dict[str, Any], console: Console) -> None:
    """What a run came to, in a few lines."""
    before, after = summary["before"], summary["after"]
    for line in (
        f"{summary['method']} on {summary['model']}, {summary['steps']} steps of {summary['seconds_per_step']:.1f} s",
        f"validation reward: {before['val/reward_mean']:.3f} → {after['val/reward_mean']:.3f}",
        f"test reward: {after['test/reward_mean']:.3f} ± {after['test/reward_std']:.3f} of {after['test/samples']} "
        f"samples (in training {summary['train_reward']:.3f}); KL {after['test/kl']:.2f} nats per continuation",
        f"soft tokens cover {summary['coverage']:.1%} of the probability",
        f"memory: {format_bytes(summary['peak_memory_bytes'])} at the peak, the whole process",
        f"in {summary['output_dir']}",
    ):
        say(console, line)
