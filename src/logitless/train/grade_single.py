"""`run_one`: a policy aligned by one method on soft tokens, from a `GradeConfig` to a summary."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rich.console import Console

from ..memory.units import counted, format_bytes
from ..versions import versions
from .files import read_lines, write_json
from .grade_config import GradeConfig
from .grade_run import Run, evaluation, steps
from .grade_setup import policy_of, set_up
from .progress import say
from .rundir import SUMMARY_FILE, claim, explained
from .sft import METRICS_FILE, save_model

SCHEMA = 1


def run_one(config: GradeConfig, console: Console) -> dict[str, Any]:
    """Aligns by `config.method` and returns the summary, as `grade.run` says."""
    source, tokenizer = policy_of(config, console)
    place = claim(config, config.method)
    with explained(place, "align"):
        state = set_up(config, place, source, tokenizer, console)
        return _conclude(state, steps(state))


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
        "whole_distributions_bytes": state.method.vocabulary_bytes(config, state.task.vocab_size),
        "versions": versions("torch", "transformers", "peft"),
        "output_dir": str(place),
        "checkpoint": str(place / "model"),
    }
    write_json(place / SUMMARY_FILE, summary)
    return summary


def show(summary: dict[str, Any], console: Console) -> None:
    """What a run came to, in a few lines."""
    before, after = summary["before"], summary["after"]
    steps = counted(summary["steps"], "step")
    for line in (
        f"{summary['method']} on {summary['model']}, {steps} of {summary['seconds_per_step']:.1f} s",
        f"validation reward: {before['val/reward_mean']:.3f} → {after['val/reward_mean']:.3f}",
        f"test reward: {after['test/reward_mean']:.3f} ± {after['test/reward_std']:.3f} of {after['test/samples']} "
        f"samples (in training {summary['train_reward']:.3f}); KL {after['test/kl']:.2f} nats per continuation",
        f"soft tokens cover {summary['coverage']:.1%} of the probability",
        f"memory: {format_bytes(summary['peak_memory_bytes'])} at the peak, the whole process",
        f"in {summary['output_dir']}",
    ):
        say(console, line)
