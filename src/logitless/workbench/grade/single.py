"""`run_one`: a policy aligned by one method on soft tokens, from a `GradeConfig` to a summary."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ...errors import ConfigError, OptionError, in_one_line
from ...hashes import hash_of
from ...integrations.transformers.soft_tokens import reader_of
from ...models.positions import check_steady, reach
from ...relax.generate import alive_until
from ...resident import reset_peak
from ...units import one_unit, plural
from ...versions import versions
from ..common.device import device_of
from ..common.files import read_lines, readable, write_json, write_lines, write_text, write_whole
from ..common.functions import blamed, function_named
from ..common.launch import launched_ranks
from ..common.say import say
from ..common.written import PROMPTS_FILE, REWARD, SUMMARY_FILE
from ..runs import examples
from ..runs.ending import explained, whence
from ..runs.rundir import as_begun, claim, options_kept, record
from ..runs.trackers import Send, reporting
from ..runs.trainer import model_facts, save_model
from ..sft.default_model import default_model
from ..sources.generation import align_tokens
from ..sources.identity import files_of
from ..sources.model import (
    ModelSource,
    build,
    check_classifier,
    check_used,
    check_weights,
    load_tokenizer,
    resolve,
    resolve_trained,
    rounding_of,
    said_of,
)
from ..sources.tokenizer import TextTokenizer
from .config import GradeConfig
from .data import Prompts, prompts_of, saved_classifier, texts_of, train_classifier
from .method import Task
from .methods import method_of
from .models import Reward, SoftReward, TokenReward, shared_vocabulary
from .steps import Run, evaluation, restore, steps

SCHEMA = 1


def run_one(config: GradeConfig, console: Console, whole: Path | None = None) -> dict[str, Any]:
    """Aligns by `config.method` and returns the summary, as `run.run` says.

    whole: the directory of a comparison, beside whose prompts and reward the run's own directory lies.
    """
    source, tokenizer = policy_of(config, console)
    place = claim(config, config.method)
    with explained(place, "align"), reporting(config, config.report_to, place) as send:
        with options_kept(place):
            if whole is not None:
                _share(whole, place)
            state = set_up(config, place, source, tokenizer, console, own=whole is None)
        _examples(state, "before")
        restore(state)
        return _conclude(state, steps(state, send), send)


def _share(whole: Path, place: Path) -> None:
    """A comparison's prompts and reward as a run's own; the link leads to the reward wherever both are moved."""
    if not (place / PROMPTS_FILE).exists():
        write_text(place / PROMPTS_FILE, (whole / PROMPTS_FILE).read_text(encoding="utf-8"))
    if (whole / REWARD).exists() and not (place / REWARD).exists():
        (place / REWARD).unlink(missing_ok=True)  # a link that leads nowhere
        (place / REWARD).symlink_to(Path("..", REWARD))


def policy_of(config: GradeConfig, console: Console) -> tuple[ModelSource, TextTokenizer]:
    """The model to align and its tokenizer; the default one is trained first. Raises LogitlessError for bad input."""
    if launched_ranks() > 1:
        raise OptionError(
            f"--method {config.method} runs on one device: start it without torchrun or accelerate launch"
        )
    device_of(config.device)
    if config.resume is None:  # a run that goes on had its model
        default_model(config.model, config.device, console)
    source = resolve_trained(config.model, "align")
    check_steady(source.config, config.context_length, config.length_options)
    tokenizer = load_tokenizer(source)
    if config.top_k > tokenizer.size:  # rows behind pad the embedding
        raise OptionError(f"--top-k {config.top_k}: {config.model} has a vocabulary of {tokenizer.size:,}")
    return source, tokenizer


def set_up(
    config: GradeConfig, place: Path, source: ModelSource, tokenizer: TextTokenizer, console: Console, own: bool = True
) -> Run:
    """A run as it begins; `restore` goes on with one. own: of no comparison, which warns for all of its runs."""
    device = device_of(config.device)
    if config.resume:
        say(console, f"going on from {whence(place)}")
    model = build(config, source).to(device).eval()  # dropout would differ between the passes of one step
    if own and (rounding := rounding_of(config, model)):
        say(console, f"warning: {rounding}")
    align_tokens(model, tokenizer)
    reader_of(model, tokenizer.size)  # refuses a model before a reward is learned for it
    materials(config, place, model, tokenizer, console)
    reward, vocab_size = reward_of(config, place, model, tokenizer)
    prompts = _prompts(place / PROMPTS_FILE, vocab_size)
    frozen = None if config.lora_rank else copy.deepcopy(model).requires_grad_(False)
    method = method_of(Task(config, model, frozen, reward, vocab_size, tokenizer.eos_id))
    leaves = [*(p for p in model.parameters() if p.requires_grad), *method.parameters()]
    optimizer = torch.optim.AdamW(leaves, lr=config.rate, weight_decay=0.0)
    state = Run(config, place, method, tokenizer, prompts, optimizer, console)
    record(config, place, inputs=inputs_of(config, source, reward))
    reset_peak(device)
    return state


def inputs_of(config: GradeConfig, source: ModelSource, reward: Reward) -> dict[str, str]:
    """What tells the models, or the rule, that a run reads from all others."""
    found = files_of("model", source)
    if config.reward_model is not None:
        found |= files_of("reward-model", resolve(config.reward_model))
    if config.token_reward is not None:
        found[f"what --token-reward {config.token_reward} gives"] = hash_of(reward.table.cpu().numpy().tobytes())
    return found


def _prompts(path: Path, vocab_size: int) -> Prompts:
    """The prompts of each split that `materials` wrote; DataError for others."""
    found: Prompts = {"train": [], "validation": [], "test": []}
    with readable(path):
        for row in read_lines(path):
            found[row["split"]].append(row["ids"])
            if not row["ids"] or not all(type(x) is int and 0 <= x < vocab_size for x in row["ids"]):
                raise ValueError(f"expected ids below {vocab_size}, got {row['ids']}")
        if not all(found.values()):
            raise ValueError("a split without prompts")
    return found


def materials(config: GradeConfig, place: Path, model: Any, tokenizer: TextTokenizer, console: Console) -> None:
    """prompts.jsonl, and reward/ where no reward model is named, unless they lie there already."""
    wants_prompts = not (place / PROMPTS_FILE).exists()
    learns = config.reward_model is None and config.token_reward is None
    wants_reward = learns and not (place / REWARD).exists()
    texts = texts_of(config.data, partial(say, console)) if wants_prompts or wants_reward else None
    if texts is not None and wants_reward:
        learned = texts.reward or texts_of(None).reward
        say(console, "training the reward: prose against code, on files that no prompt comes from ...")
        base = model.get_base_model() if config.lora_rank else model
        found, accuracy = train_classifier(base, learned, tokenizer, config.seed, config.completion_length)
        say(console, f"it is right about {accuracy:.0%} of passages of files that it never saw")
        write_whole(place / REWARD, lambda path: saved_classifier(path, found, tokenizer))
    if texts is not None and wants_prompts:
        found = prompts_of(as_begun(config, place), texts, tokenizer)
        write_lines(place / PROMPTS_FILE, [{"split": name, "ids": x} for name, rows in found.items() for x in rows])


def named_reward(config: GradeConfig, place: Path) -> dict[str, str | None]:
    """What rewards the run, for its summary."""
    learned = None if config.token_reward else str(place / REWARD)
    return {"reward_model": config.reward_model or learned, "token_reward": config.token_reward}


def reward_of(config: GradeConfig, place: Path, model: Any, tokenizer: TextTokenizer) -> tuple[Reward, int]:
    """(what rewards the run, how many vocabulary entries it shares with the policy)."""
    if config.token_reward is not None:
        vocab_size = shared_vocabulary(model, model, tokenizer.saved, tokenizer.saved)
        rule = function_named("--token-reward", config.token_reward)
        with blamed(f"--token-reward {config.token_reward}", "; it is called with the text of each token"):
            reward = TokenReward.of(rule, config.token_reward, tokenizer.saved, vocab_size, model.device)
        return reward, vocab_size
    reward, source = _reward_model(config.reward_model or str(place / REWARD), config.completion_length)
    theirs = tokenizer if config.reward_model is None else load_tokenizer(source)
    vocab_size = shared_vocabulary(model, reward, tokenizer.saved, theirs.saved)
    return SoftReward.of(reward.to(model.device), vocab_size, config.reward_label), vocab_size


def _reward_model(name: str, length: int) -> tuple[Any, ModelSource]:
    """The classifier that reads completions of `length` tokens. Raises LogitlessError for one that cannot."""
    from transformers import AutoModelForSequenceClassification

    with said_of("reward-model"):
        check_classifier(name)
        source = resolve(name)
    longest = reach(source.config)
    if longest is not None and length > longest:
        raise OptionError(
            f"--completion-length {length}: --reward-model {name} has positions up to {longest}; give one with more, "
            "or shorter completions"
        )
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            name,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_weights` names them
        )
    except Exception as error:  # of several libraries
        raise ConfigError(f"--reward-model {name}: {in_one_line(error, 300)}") from None
    check_weights(f"--reward-model {name}", name, model, found)
    check_used(f"--reward-model {name}", found["unexpected_keys"], model)
    return model, source


def _examples(state: Run, when: str) -> None:
    """Completions of the first validation prompts with their rewards."""
    config, task = state.config, state.task

    def score(ids: Tensor) -> float:
        alive = alive_until(ids[None], task.end)
        return float(task.reward.of_ids(ids[None], alive))

    prompts, length = state.prompts["validation"], config.completion_length
    padding = range(task.vocab_size, task.model.config.get_text_config().vocab_size)  # entries that no reward knows
    sampling = {"top_k": config.top_k, "suppress_tokens": [*padding] or None}
    examples.keep(state.place, when, task.model, state.tokenizer, prompts, length, score=score, **sampling)


def _conclude(state: Run, before: dict[str, float], send: Send) -> dict[str, Any]:
    """Evaluates, saves the model and writes the summary."""
    config, place, model = state.config, state.place, state.task.model
    after, test = evaluation(state, "validation"), evaluation(state, "test")
    send(test, state.step)
    _examples(state, "after")
    memory = before.pop("memory_bytes", None)
    trained = _trained(state.records)
    facts = model_facts(model)
    save_model(place, state.tokenizer, config.lora_rank, model, None)
    summary = {
        "schema": SCHEMA,
        "method": config.method,
        "model": config.model,
        **named_reward(config, place),
        "data": config.data_name,
        "prompts": {name: len(rows) for name, rows in state.prompts.items()},
        **facts,
        "vocab_size": state.task.vocab_size,
        "device": str(model.device),
        "learning_rate": config.rate,
        "steps": state.step,
        "before": before,
        "after": {**after, **test},
        **trained,
        "generalisation_gap": trained["train_reward"] - test["test/reward_mean"],
        "memory_bytes": memory,
        "whole_distributions_bytes": state.method.vocabulary_bytes(config, state.task.vocab_size),
        "versions": versions("torch", "transformers", "peft"),
        "output_dir": str(place),
        "checkpoint": str(place / "model"),
    }
    write_json(place / SUMMARY_FILE, summary)
    return summary


def _trained(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the steps come to, by their records; the training's reward is that of the last tenth of them."""
    steps_taken = [x for x in records if "train/reward" in x]
    varied = [x for x in records if "grad_variance" in x]
    last = steps_taken[-max(1, len(steps_taken) // 10) :]
    return {
        "train_reward": fmean(x["train/reward"] for x in last),
        "training": {name: fmean(x[f"train/{name}"] for x in steps_taken) for name in ("reward", "kl")},
        "grad_variances": [x["grad_variance"] for x in varied],
        "grad_mean_squares": [x["grad_mean_square"] for x in varied],
        "seconds_per_step": fmean(x["seconds"] for x in steps_taken),
        "training_seconds": sum(x["seconds"] for x in steps_taken),
        "peak_memory_bytes": max(x["peak_memory_bytes"] for x in steps_taken),
        "coverage": fmean(x["coverage"] for x in steps_taken),
    }


def _memory(summary: dict[str, Any]) -> str:
    used, peak = summary["memory_bytes"], summary["peak_memory_bytes"]  # used is None where another version began
    size = one_unit((used or 0, peak))
    own = "" if used is None else f"{size(used)} for a batch's gradient, beside weights and gradients; "
    return f"{own}{size(peak)} at the peak, the whole process"


def show(summary: dict[str, Any], console: Console) -> None:
    """What a run came to, in a few lines."""
    examples.show(Path(summary["output_dir"]), console)
    before, after = summary["before"], summary["after"]
    steps = plural(summary["steps"], "step")
    for line in (
        f"{summary['method']} on {summary['model']}, {steps} of {summary['seconds_per_step']:.1f} s",
        f"validation reward: {before['val/reward_mean']:.3f} → {after['val/reward_mean']:.3f}",
        f"test reward: {after['test/reward_mean']:.3f}, standard deviation {after['test/reward_std']:.3f} over "
        f"{plural(after['test/samples'], 'sample')} (in training {summary['train_reward']:.3f}); "
        f"KL {after['test/kl']:.2f} nats per continuation",
        f"soft tokens cover {summary['coverage']:.1%} of the probability",
        f"memory: {_memory(summary)}",
        f"in {summary['output_dir']}",
    ):
        say(console, line)
