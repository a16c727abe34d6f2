"""`run`: a language model aligned by rewards or preferences, from an `AlignConfig` to a checkpoint and a summary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from ...errors import ConfigError, DataError, NotFiniteError
from ...integrations.trl.trainers import install
from ...models.positions import steady_reach
from ...resident import reset_peak
from ...units import plural
from ...versions import versions
from ..common.device import device_of
from ..common.files import read_lines, write_json
from ..common.say import say
from ..common.written import METRICS_FILE, ROWS_FILE, SUMMARY_FILE
from ..runs import examples
from ..runs.callbacks import Records
from ..runs.checkpoints import last_checkpoint
from ..runs.ending import explained, how_to_go_on, whence
from ..runs.ranks import agree, first, lost, together
from ..runs.rundir import as_begun, claim, options_kept, ranks_at_start, record
from ..runs.steps import taking_steps
from ..runs.trainer import gathered, model_facts, on_processors, quiet, save_model
from ..sft.default_model import default_model
from ..sft.launcher import NOT_COMPILED, check_told
from ..sources.corpus import Row
from ..sources.generation import align_tokens, from_all_entries
from ..sources.identity import files_of
from ..sources.model import ModelSource, build, load_tokenizer, resolve_trained, rounding_of
from ..sources.tokenizer import TextTokenizer, prompt_ids
from .callbacks import AlignProgress, HeldOutRows, MemoryMetrics
from .config import AlignConfig
from .data import (
    MOST_PAIRS,
    MOST_ROWS,
    check_differ,
    check_enough,
    check_room,
    load,
    rows_of,
    save,
    with_rejected,
)
from .report import SCHEMA, numbers, plot
from .trainers import Alignment, after_epochs, check_available, check_pairs, dense_bytes, longest_pair, trainer_of


def run(config: AlignConfig, console: Console | None = None) -> dict[str, Any]:
    """Aligns as `config` says and returns the summary, which also lies in the run's directory.

    Writes checkpoint-N (to resume from), model (weights as safetensors, tokenizer), rows.jsonl (prompts or pairs),
    metrics.jsonl, align.png, summary.json and run.json. Raises LogitlessError for bad input and Interrupted when
    asked to stop. On the other ranks of a distributed launch the summary is empty.
    """
    console = console or Console(stderr=True)
    quiet()
    check_available(config.check())
    check_told("align", NOT_COMPILED)  # whose weights, by the names that a compiled model gives them, none would load
    device_of(config.device)
    PartialState(cpu=on_processors(config))
    if config.resume is None:  # a run that goes on had its model
        default_model(config.model, config.device, console)
    place = config.resume
    with lost(lambda: how_to_go_on(place, "align")):
        source, tokenizer = together(lambda: _found(config))
        agree(vocabulary=(source.vocab_size, tokenizer.size), **config.to_dict())
        place = first(lambda: claim(config, config.method))
        kept = options_kept(place) if PartialState().is_main_process else nullcontext()
        with explained(place, "align"), kept, _divergence_named(), warnings.catch_warnings():
            # TRL 1.16 and PEFT 0.21 ask for names that transformers has renamed: nothing that a user could change.
            warnings.filterwarnings("ignore", ".*checkpointing.* is deprecated", FutureWarning)
            return _placed(config, place, source, tokenizer, console)


def _found(config: AlignConfig) -> tuple[ModelSource, TextTokenizer]:
    source = resolve_trained(config.model, "align")
    return source, load_tokenizer(source)


def _placed(
    config: AlignConfig, place: Path, source: ModelSource, tokenizer: TextTokenizer, console: Console
) -> dict[str, Any]:
    """The run in its place, from preparing the rows to the summary."""
    parts, model = _set_up(config, place, source, tokenizer, console)
    budget = config.memory_budget_bytes
    with from_all_entries(model):
        trainer = trainer_of(parts, model)
        install(trainer, exact_kl=config.exact_kl, replay=config.replays, order=config.order, memory_budget=budget)
        weights = _steps(parts, trainer)
    if not PartialState().is_main_process:
        return {}
    return _conclude(parts, trainer, _trained(parts, source, trainer, weights), weights)


@contextmanager
def _divergence_named() -> Iterator[None]:
    """NotFiniteError where transformers cannot sample, since the policy's logits are NaN or infinite."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise NotFiniteError(
            "the policy's probabilities are not finite, so that nothing can be sampled: lower --learning-rate, or "
            "begin with a model whose weights are finite; checkpoints are kept"
        ) from None


def _set_up(
    config: AlignConfig, place: Path, source: ModelSource, tokenizer: TextTokenizer, console: Console
) -> tuple[Alignment, Any]:
    state, path = PartialState(), place / ROWS_FILE
    if config.resume and state.is_main_process:
        say(console, f"going on from {whence(place)}")
    model = build(config, source, length=1)  # `check_room` and `check_pairs` look at the rows
    if state.is_main_process and (rounding := rounding_of(config, model)):
        say(console, f"warning: {rounding}")
    align_tokens(model, tokenizer)
    device: Any = state.device
    reset_peak(device)

    def prepared() -> None:
        if config.resume and (ranks := ranks_at_start(place)) != state.num_processes:
            raise ConfigError(
                f"--resume {place}: a step of this run is the batches of {plural(ranks, 'rank')}: launch as many, got "
                f"{state.num_processes}"
            )
        if not (config.resume and path.exists()):
            _prepare(as_begun(config, place), path, model, tokenizer, console)
        record(config, place, state.num_processes, files_of("model", source))

    first(prepared)
    train, held_out = load(path, config)
    return Alignment(config, place, tokenizer, train, held_out, console), model


def _prepare(config: AlignConfig, path: Path, model: Any, tokenizer: TextTokenizer, console: Console) -> None:
    """Writes the prompts, or the pairs, of all steps."""
    what, state = "prompts" if config.kind.rollouts else "pairs", PartialState()
    say(console, f"taking {what} from {config.data or 'the standard library'} ...")
    train, held_out = rows_of(config, tokenizer, _wanted(config, state.num_processes), partial(say, console))
    check_enough(config, train, state.num_processes)
    if config.kind.rollouts or "chosen" not in train[0]:
        check_room(config, [*train, *held_out], tokenizer, steady_reach(model.config))
    if not config.kind.rollouts:
        model = model.to(state.device)
        with from_all_entries(model):
            train, held_out = (_pairs(config, rows, model, tokenizer, console) for rows in (train, held_out))
        check_differ(config, train, partial(say, console))
    save(path, train, held_out)


def _wanted(config: AlignConfig, ranks: int) -> int:
    """How many prompts or pairs the run's steps look at."""
    if config.kind.rollouts:
        per_step = config.prompts_per_step(ranks)
        return min(config.max_steps * per_step, max(per_step, MOST_ROWS))
    return min(config.max_steps * config.batch_size * config.gradient_accumulation_steps * ranks, MOST_PAIRS)


def _pairs(config: AlignConfig, rows: list[Row], model: Any, tokenizer: TextTokenizer, console: Console) -> list[Row]:
    if "chosen" not in rows[0]:
        say(console, f"sampling {plural(len(rows), 'continuation')} of the model's own, to be rejected ...")
    pairs = with_rejected(rows, model, tokenizer, config)
    if not pairs:
        raise DataError(
            f"{config.data_said}: expected text in the model's own {plural(len(rows), 'continuation')}, "
            "to be rejected, got blank ones alone: give chosen and rejected, or a model that says something"
        )
    return pairs


def _steps(parts: Alignment, trainer: Any) -> dict[str, Any]:
    """Trains, or finishes what a resumed run left; returns the weights, gathered from wherever they lie."""
    config, place, arguments = parts.config, parts.place, trainer.args
    checkpoint, step = last_checkpoint(place) or (None, 0)
    per_step = config.batch_size * config.gradient_accumulation_steps * arguments.world_size * config.context_length
    records = Records(place / METRICS_FILE, per_step, checkpoint, every_metric=True)
    held_out = HeldOutRows(trainer.evaluate, records)
    trainer._total_train_tokens = records.tokens  # which TRL counts for pairs, and keeps in no checkpoint
    itemsize = 2 if arguments.bf16 else trainer.model.dtype.itemsize
    dense = partial(dense_bytes, config, trainer.model.config.get_text_config().vocab_size, itemsize)
    longest = config.completion_length
    if not config.kind.rollouts:
        longest = longest_pair(trainer.train_dataset)
        longest_of_all = max(longest, longest_pair(trainer.eval_dataset))
        check_pairs(config, longest_of_all, steady_reach(trainer.model.config))
    trainer.callback_handler.callbacks.insert(0, MemoryMetrics(dense, longest))
    _examples(parts, trainer, "before")
    bar = AlignProgress(records, parts.console)
    with taking_steps(trainer, place, config.report_to, checkpoint, held_out, bar) as began:
        if began and config.kind.rollouts:
            after_epochs(trainer, int(began.epoch))
        if step >= config.max_steps:  # killed between its last checkpoint and its summary
            trainer._load_from_checkpoint(str(checkpoint))
            trainer._load_rng_state(str(checkpoint))  # held-out completions are sampled
            trainer.state = began
            records.rewrite(arguments)
            arguments.report_to = []  # the trackers' run has ended
            held_out.conclude(arguments, step)
        else:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    _examples(parts, trainer, "after")
    return trainer.accelerator.get_state_dict(trainer.model_wrapped)


def _examples(parts: Alignment, trainer: Any, when: str) -> None:
    """Completions of the first held-out prompts, on one device alone, where the model is whole."""
    if trainer.args.world_size > 1:
        return
    config, tokenizer = parts.config, parts.tokenizer
    prompts = [row["prompt"] for row in parts.held_out[: examples.COUNT]]
    ids, length = prompt_ids(prompts, tokenizer), config.completion_length
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "min_p": config.min_p or None}
    examples.keep(parts.place, when, trainer.model, tokenizer, ids, length, order=config.order, **sampling)


def _trained(parts: Alignment, source: ModelSource, trainer: Any, weights: dict[str, Any]) -> Any:
    """The trained model; where FSDP2 of accelerate's launcher divided it, a new one of the gathered weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if "ref" in getattr(model, "peft_config", {}):
        model.delete_adapter("ref")  # TRL's copy of the adapters as they began
    if not trainer.accelerator.is_fsdp2:
        return model
    weights = {name: weights[name] for name in model.state_dict()}  # without that copy's
    return gathered(parts.config, source, parts.tokenizer, weights, length=1)


def _conclude(parts: Alignment, trainer: Any, model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Saves the model, draws the plot and writes the summary."""
    config, place = parts.config, parts.place
    facts = model_facts(model)
    save_model(place, parts.tokenizer, config.lora_rank, model, weights)
    records = read_lines(place / METRICS_FILE)
    plot(place / "align.png", config.method, records)
    trained = numbers(config.method, records)
    names = getattr(trainer, "reward_func_names", [])
    summary = {
        "schema": SCHEMA,
        "method": config.method,
        "model": config.model,
        "data": config.data_name,
        "rows": {"train": len(parts.train), "held_out": len(trainer.eval_dataset)},
        **facts,
        "vocab_size": model.config.get_text_config().vocab_size,
        "device": str(PartialState().device),
        "learning_rate": config.rate,
        "beta": config.kl_weight,
        "exact_kl": config.exact_kl,
        "temperature": config.temperature,
        "rewards": dict(zip(names, trainer.reward_weights.tolist(), strict=True)) if names else {},
        **trained,
        "versions": versions("torch", "transformers", "trl"),
        "output_dir": str(place),
        "checkpoint": str(place / "model"),
    }
    write_json(place / SUMMARY_FILE, summary)
    return summary
