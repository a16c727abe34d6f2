"""`run`: a causal language model trained on text, from a `TrainConfig` to a checkpoint and a summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import Trainer

from ...algebra.costs import logits_bytes
from ...errors import OptionError
from ...integrations.transformers.install import install
from ...integrations.transformers.installed import choose
from ...models.catalog import HUB
from ...models.context_parallel import Part, attach, check_config
from ...models.nsa.options import saved_with_nsa
from ...models.packed import keeps_apart
from ...models.positions import check_steady
from ...models.tensor_parallel import check_split
from ...versions import version_of, versions
from ..common.device import device_of
from ..common.files import read_lines, read_object, readable, write_json
from ..common.plots import plot_loss, plot_memory
from ..common.say import say
from ..common.written import METRICS_FILE, SUMMARY_FILE, TOKENS_FILE
from ..runs.callbacks import HeldOut, Records
from ..runs.checkpoints import last_checkpoint
from ..runs.ending import explained, how_to_go_on, whence
from ..runs.progress import ProgressBar
from ..runs.ranks import accumulation, agree, first, lost, together
from ..runs.rundir import claim, name_of, options_kept, ranks_at_start, record
from ..runs.steps import taking_steps
from ..runs.trackers import check_tracker, project
from ..runs.trainer import arguments, gathered, model_facts, on_processors, quiet, save_model
from ..sources.generation import align_tokens
from ..sources.identity import files_of
from ..sources.model import ModelSource, build, check_mixed, load_tokenizer, reaching, resolve, rounding_of
from ..sources.packing import Collate, PackedRows, collate
from ..sources.tokenizer import TextTokenizer
from .config import TrainConfig
from .data import check_teacher, load, prepare
from .launcher import by_options_alone
from .mesh import CONTEXT, Layout, device_mesh
from .sharded import STATE, ShardedTrainer
from .stepcost import METHODS, check_measured, measure
from .summary import SCHEMA, numbers
from .teacher import TaughtRows, TaughtShardedTrainer, TaughtTrainer, Teacher


class Found(NamedTuple):
    """What the options name, before the run has a place."""

    source: ModelSource
    layout: Layout
    tokenizer: TextTokenizer
    teacher: Teacher | None


@dataclass(frozen=True)
class Run:
    """A run's place and parts, once its input is known to be good."""

    config: TrainConfig
    place: Path
    source: ModelSource
    tokenizer: TextTokenizer
    train: PackedRows
    held_out: PackedRows
    console: Console
    layout: Layout
    teacher: Teacher | None = None


def run(config: TrainConfig, console: Console | None = None) -> dict[str, Any]:
    """Trains as `config` says and returns the summary, which also lies in the run's directory.

    Writes checkpoint-N (to resume from), model (weights as safetensors, tokenizer), metrics.jsonl, loss.png,
    memory.png, summary.json and run.json. Raises LogitlessError for bad input and Interrupted when asked to stop.
    On the other ranks of a distributed launch the summary is empty.
    """
    console = console or Console(stderr=True)
    quiet()
    check_tracker(config.check().report_to)
    device_of(config.device)
    with by_options_alone(config):
        return _run(config, console)


def _run(config: TrainConfig, console: Console) -> dict[str, Any]:
    state = PartialState(cpu=on_processors(config), timeout=timedelta(seconds=config.rank_timeout))
    place = config.resume
    with lost(lambda: how_to_go_on(place, "train")):
        # refused before the run has a place, and by all ranks where one of them cannot read its files
        found = together(lambda: _found(config, state.num_processes))
        teacher = found.teacher
        known = {} if teacher is None else {"record": teacher.record.identity, **teacher.inputs()}
        agree(vocabulary=(found.source.vocab_size, found.tokenizer.size), **known, **config.to_dict())
        place = first(lambda: claim(config, name_of(config.model)))
        with explained(place, "train"), options_kept(place) if state.is_main_process else nullcontext():
            return _placed(config, place, found, console)


def _placed(config: TrainConfig, place: Path, found: Found, console: Console) -> dict[str, Any]:
    """The run in its place, from preparing the tokens to the summary."""
    main = PartialState().is_main_process
    if config.lora_rank and found.source.weights is None and main:
        say(console, f"warning: {_frozen_at_random(config)}")
    elif config.model in HUB and not config.resume and main:
        say(console, f"{config.model} begins with random weights; {HUB[config.model]} has trained ones")
    if config.resume and main:
        say(console, f"going on from {whence(place)}")
    parts = _set_up(config, place, found, console)
    step_memory = _step_memory(parts) if main else {}
    model = together(lambda: build(config, found.source))
    if main and not keeps_apart(model):
        kind = f"{model.config.model_type} in transformers {version_of('transformers')}"
        say(console, f"warning: {kind} does not keep packed documents apart: each sees those before it in its sequence")
    if main and (rounding := rounding_of(config, model)):
        say(console, f"warning: {rounding}")
    align_tokens(model, found.tokenizer)
    budget, threshold = config.memory_budget_bytes, config.loss_threshold_bytes
    install(model, loss=config.loss_on_ranks, memory_budget=budget, threshold=threshold)
    weights = train_steps(parts, model)
    return _conclude(parts, model, weights, step_memory) if main else {}


def _frozen_at_random(config: TrainConfig) -> str:
    """What comes of adapters on a model without weights, and what to give instead."""
    near = f", such as {HUB[config.model]}" if config.model in HUB else ""
    return (
        f"--lora-rank {config.lora_rank} trains adapters alone, and --model {config.model} is a configuration without "
        f"weights: all else stays random; give a directory or hub id with weights{near}, or leave out --lora-rank"
    )


def _found(config: TrainConfig, ranks: int) -> Found:
    source = resolve(config.model)
    check_mixed(config, source)
    layout, tokenizer = _layout(config, source, ranks), load_tokenizer(source)
    return Found(source, layout, tokenizer, Teacher.of(config, tokenizer, source.vocab_size))


def _layout(config: TrainConfig, source: ModelSource, ranks: int) -> Layout:
    """What each rank gets; raises LogitlessError where the model or the ranks cannot be divided as asked."""
    wanted = reaching(source, config.context_length, config.rope_scaling)
    layout = Layout.of(config, ranks)
    if layout.tensor > 1:
        check_split(wanted, layout.tensor, config.attention == "nsa" or saved_with_nsa(wanted))
    if layout.context > 1:
        check_config(wanted)
    check_steady(wanted, config.context_length)
    return layout


def _set_up(config: TrainConfig, place: Path, found: Found, console: Console) -> Run:
    source, layout, tokenizer, teacher = found
    tokens = place / TOKENS_FILE

    def prepared() -> tuple[int, int]:
        # refused before run.json has these options, by which the run would be gone on with
        ranks = ranks_at_start(place) if config.resume else layout.data
        per_step = config.batch_size * config.gradient_accumulation_steps * ranks
        passes = accumulation(per_step, config.batch_size, layout.data, layout.sharing)
        _check_checkpoint(place, layout)
        if not (config.resume and tokens.exists()):
            what = f"reading and tokenising {config.data or 'the standard library'}"
            say(console, f"{what if teacher is None else f'reading {teacher.record.path}'} ...")
            for remark in prepare(config, tokenizer, source.vocab_size, tokens, teacher):
                say(console, remark)
        record(config, place, layout.data, files_of("model", source) | ({} if teacher is None else teacher.inputs()))
        check_teacher(tokens, teacher)
        return per_step, passes

    per_step, passes = first(prepared)
    given = replace(config, gradient_accumulation_steps=passes)
    train, held_out = together(lambda: load(tokens, config.context_length))
    return Run(given, place, source, tokenizer, train.whole_steps(per_step), held_out, console, layout, teacher)


def _step_memory(parts: Run) -> dict[str, Any]:
    """What one step needs, logitless and dense; before training, while the memory is free. Measured once per run."""
    path = parts.place / "step_memory.json"
    if parts.teacher is not None:
        return {method: {"not_measured": "its loss is a teacher's"} for method in METHODS}
    if path.exists():
        with readable(path):
            found = read_object(path)
            check_measured(found)
            return found
    say(parts.console, "measuring one step's memory, logitless and dense ...")
    own = replace(parts.config, context_length=parts.config.context_length // parts.layout.context)
    found = measure(own, parts.place / TOKENS_FILE)
    write_json(path, found)
    return found


def train_steps(parts: Run, model: Any) -> dict[str, Any]:
    """Trains, or finishes what a resumed run left; returns the weights, gathered from wherever they lie."""
    config, place, layout, teacher = parts.config, parts.place, parts.layout, parts.teacher
    checkpoint, step = last_checkpoint(place) or (None, 0)
    rate = config.learning_rate or parts.source.default_rate(config.lora_rank)
    divided = {"sync_each_batch": layout.fsdp}  # else gradients would wait in whole for the last pass
    told: dict[str, Any] = {"report_to": config.report_to, "run_name": place.name, "project": project(config.report_to)}
    told |= {"bf16": config.mixed_precision == "bf16", "accelerator_config": {"gradient_accumulation_kwargs": divided}}
    given = arguments(config, place, rate, **told)
    per_step = config.batch_size * config.gradient_accumulation_steps * layout.data
    rows = min(per_step, len(parts.train))  # a step of a corpus without as many rows is all of them
    train = parts.train.filled(config.batch_size * layout.data) if layout.data > 1 else parts.train
    mesh = device_mesh(layout, given.device.type, config.rank_timeout)
    batch_of = _batches(layout, mesh, model)
    records = Records(place / METRICS_FILE, rows * config.context_length, checkpoint)
    held_out = HeldOut(parts.held_out, config.batch_size, records, batch_of)
    trainer = _trainer_for(parts, mesh, checkpoint)(
        model=model,
        args=given,
        train_dataset=train if teacher is None else TaughtRows(train),
        data_collator=batch_of if teacher is None else teacher.batch,
        processing_class=parts.tokenizer.saved,
    )
    bar = ProgressBar(records, parts.console)
    with taking_steps(trainer, place, config.report_to, checkpoint, held_out, bar):
        if step >= config.max_steps:  # killed between its last checkpoint and its summary
            trainer._load_from_checkpoint(str(checkpoint))
            records.rewrite(given)
            with trainer.accelerator.autocast():  # which is around a forward that was prepared to be trained
                held_out.conclude(given, step, model.to(given.device))
        else:
            held_out.send = trainer.log
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if isinstance(trainer, ShardedTrainer):
        return trainer.whole_weights()
    return trainer.accelerator.get_state_dict(trainer.model_wrapped)


def _batches(layout: Layout, mesh: Any, model: Any) -> Collate:
    """What makes batches of rows: whole ones, or where ranks share them parts, which the model is then made for."""
    if layout.context == 1:
        return collate
    group = mesh[CONTEXT].get_group()
    attach(model, group)
    part = Part.of(group)
    return lambda rows: part.cut(collate(rows))


def _trainer_for(parts: Run, mesh: Any, checkpoint: Path | None) -> Callable[..., Trainer]:
    """The Trainer that divides what is to be divided, or goes on from a checkpoint of one that did."""
    layout = parts.layout
    sharded = layout.shares or (checkpoint is not None and _is_shared(checkpoint))
    whole, divided = (Trainer, ShardedTrainer) if parts.teacher is None else (TaughtTrainer, TaughtShardedTrainer)
    kind = partial(divided, layout=layout, mesh=mesh) if sharded else whole
    return kind if parts.teacher is None else partial(kind, teacher=parts.teacher)


def _check_checkpoint(place: Path, layout: Layout) -> None:
    """OptionError where ranks would share weights or sequences, and go on from a checkpoint made without."""
    checkpoint, _ = last_checkpoint(place) or (None, 0)
    if layout.shares and checkpoint is not None and not _is_shared(checkpoint):
        raise OptionError(
            f"--resume {place}: its checkpoints were made with whole weights on every rank; go on without "
            "--sharding fsdp2, --tensor-parallel and --context-parallel"
        )


def _is_shared(checkpoint: Path) -> bool:
    """Whether all ranks wrote this checkpoint, a share each."""
    return any((checkpoint / STATE).glob("*"))


def _conclude(parts: Run, model: Any, weights: dict[str, Any], step_memory: dict[str, Any]) -> dict[str, Any]:
    """Saves the model, draws the plots and writes the summary."""
    config, place = parts.config, parts.place
    if not parts.layout.whole:
        model = gathered(config, parts.source, parts.tokenizer, weights)
    facts = model_facts(model)
    vocab, weight = parts.source.vocab_size, model.get_output_embeddings().weight
    dtype = torch.bfloat16 if config.mixed_precision == "bf16" else weight.dtype  # of logits
    rows = min(config.batch_size, len(parts.train))
    tokens = rows * config.context_length // config.context_parallel  # of one pass, on each rank
    size, budget = logits_bytes(tokens, vocab, dtype.itemsize), config.memory_budget_bytes
    save_model(place, parts.tokenizer, config.lora_rank, model, weights)
    records = read_lines(place / METRICS_FILE)
    plot_loss(place / "loss.png", records, vocab)
    trained = numbers(records)
    plot_memory(place / "memory.png", step_memory, tokens, vocab)
    summary = {
        "schema": SCHEMA,
        "model": config.model,
        "data": config.data or config.teacher or config.data_name,
        "teacher": None if parts.teacher is None else parts.teacher.summary(),
        **facts,
        "mixed_precision": config.mixed_precision,
        "vocab_size": vocab,
        "device": str(PartialState().device),
        "ranks": PartialState().num_processes,
        "sharding": config.sharding,
        "tensor_parallel": config.tensor_parallel,
        "context_parallel": config.context_parallel,
        **trained,
        "loss": {
            "asked": config.loss,
            "method": choose(config.loss_on_ranks, size, config.loss_threshold_bytes),
            "logits_bytes": size,
            "memory_budget_bytes": budget,
            "threshold_bytes": config.loss_threshold_bytes,
        },
        "step_memory": {name: {k: v for k, v in r.items() if k != "curve"} for name, r in step_memory.items()},
        "versions": versions("torch", "transformers"),
        "output_dir": str(place),
        "checkpoint": str(place / "model"),
    }
    write_json(place / SUMMARY_FILE, summary)
    return summary
