"""What `logitless sample` does: a model, prompts in batches, and each completion in words and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
import torch
from rich.console import Console
from torch import Tensor

from ...errors import ConfigError, OptionError
from ...integrations.transformers.generation import generate
from ...models.positions import reach
from ...printable import shown
from ...sample.record import SampleRecord
from ...sample.shown import to_dict
from ...sample.terminal import streamed
from ...units import plural
from ..common.device import device_of
from ..common.options import budget_bytes_on
from ..common.say import quiet
from ..sft.default_model import default_model
from ..sources.generation import check_generation, left_padded
from ..sources.model import ModelSource, load_model, load_tokenizer, resolve_trained
from ..sources.tokenizer import TextTokenizer, prompt_ids
from .config import SampleConfig

OTHER_CUTS = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}  # none of them
GREEDY = {"do_sample": False, "penalty_alpha": None}  # contrastive search, which a file may ask for, is not
DRAWN = ("temperature", "top_k", "top_p", "min_p", "order", "repetition_penalty")


@dataclass(frozen=True)
class Job:
    """One completion to make."""

    prompt: str
    ids: list[int]
    seed: int
    room: int  # tokens that it may have: --max-new-tokens, or less where the context ends
    answers: bool = False  # the prompt, in the chat template, rather than goes on from it

    @property
    def shown(self) -> str:
        """The prompt as it is shown: an answer begins on a line of its own."""
        return shown(self.prompt) + ("\n" if self.answers else "")


def run(
    config: SampleConfig, prompts: list[str], console: Console, screen: Console | None = None
) -> tuple[dict[str, Any], pa.Table]:
    """(what is shown and written as JSON, the records as a table); a `screen` sees the only completion as it comes."""
    quiet()
    default_model(config.model, config.device, console)
    source = _source(config)
    tokenizer = load_tokenizer(source)
    saved = tokenizer.saved
    jobs = _jobs(config, prompts, tokenizer, reach(source.config))
    model = _load(config, source, tokenizer)
    sequences, tables = [], []
    with _watched(jobs, saved, console, screen) as on_step:
        for batch in _batches(jobs, config.batch_size):
            for job, record in zip(batch, _complete(config, model, saved, batch, on_step), strict=True):
                about = to_dict(record, saved, job.ids)
                tables.append(_table(record, about, len(sequences)))
                sequences.append(_named(config, job, about, _ends(model)))
    summary = {
        "schema": 1,
        "model": config.model,
        "options": {name: getattr(config, name) for name in (*DRAWN, "max_new_tokens", "seed")},
        "sequences": sequences,
    }
    table = pa.concat_tables(tables)
    told = {**summary, "sequences": [{k: s[k] for k in ("prompt", "text", "finish")} for s in sequences]}
    return summary, table.replace_schema_metadata({**(table.schema.metadata or {}), b"logitless": json.dumps(told)})


def _source(config: SampleConfig) -> ModelSource:
    source = resolve_trained(config.model, "sample from")
    if config.keep > source.vocab_size:
        raise OptionError(f"--keep must be at most the vocabulary, here {source.vocab_size:,}, got {config.keep:,}")
    return source


def _load(config: SampleConfig, source: ModelSource, tokenizer: TextTokenizer) -> Any:
    """The model, on its device. Raises LogitlessError."""
    model = load_model(source, dtype=config.dtype)
    if model.generation_config.eos_token_id is None:  # a text would go on behind the token that documents end with
        model.generation_config.eos_token_id = tokenizer.eos_id
    check_generation(model, tokenizer.saved, source.name)
    return model.eval().to(device_of(config.device))


def _jobs(config: SampleConfig, prompts: list[str], tokenizer: TextTokenizer, context: int | None) -> list[Job]:
    """Every completion, with a seed that depends on its number alone."""
    count = len(prompts) * config.completions
    seeds = torch.randint(2**63 - 1, (count,), generator=torch.Generator().manual_seed(config.seed)).tolist()
    jobs = []
    for number, prompt in enumerate(prompts):
        ids = _encoded(config, prompt, tokenizer)
        if not ids:
            raise OptionError(f"prompt {number + 1}: expected at least one token, got none")
        if context is not None and len(ids) >= context:
            raise OptionError(
                f"prompt {number + 1} has {plural(len(ids), 'token')}, and the model's context only {context:,}: "
                "shorten it"
            )
        own = seeds[number * config.completions : (number + 1) * config.completions]
        room = config.max_new_tokens if context is None else min(config.max_new_tokens, context - len(ids))
        jobs += [Job(prompt, ids, seed, room, _in_chat(config, tokenizer)) for seed in own]
    return jobs


def _batches(jobs: list[Job], size: int) -> Iterator[list[Job]]:
    """The jobs in their order, some at a time; those of a batch have the same room, so that none is cut short."""
    for _, alike in groupby(jobs, key=lambda job: job.room):
        some = list(alike)
        yield from (some[start : start + size] for start in range(0, len(some), size))


@contextmanager
def _watched(
    jobs: list[Job], tokenizer: Any, console: Console, screen: Console | None
) -> Iterator[Callable[[SampleRecord], None] | None]:
    """What is shown while tokens are drawn: the text itself on a screen, or that something is going on."""
    if screen is not None:
        with streamed(screen, tokenizer, jobs[0].shown, jobs[0].ids) as put:
            yield put
        return
    with console.status(f"sampling {plural(len(jobs), 'completion')} ...", spinner="line"):
        yield None


def _encoded(config: SampleConfig, prompt: str, tokenizer: TextTokenizer) -> list[int]:
    """A prompt's ids, in the chat template where it is wanted."""
    if not _in_chat(config, tokenizer):
        if config.chat == "yes":
            raise OptionError("--chat yes: the tokenizer has no chat template; use --chat no")
        return prompt_ids([prompt], tokenizer)[0]
    try:
        return prompt_ids([[{"role": "user", "content": prompt}]], tokenizer)[0]
    except ConfigError as error:
        raise ConfigError(f"{error}; use --chat no") from None


def _in_chat(config: SampleConfig, tokenizer: TextTokenizer) -> bool:
    return config.chat != "no" and bool(getattr(tokenizer.saved, "chat_template", None))


def _complete(
    config: SampleConfig, model: Any, tokenizer: Any, jobs: list[Job], on_step: Callable[[SampleRecord], None] | None
) -> list[SampleRecord]:
    """The record of each completion of a batch, (T,) each."""
    pad = next(iter(_ends(model)), 0) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids, mask = left_padded([job.ids for job in jobs], pad, model.device)
    warm = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    out = generate(
        model,
        {"input_ids": ids, "attention_mask": mask},
        keep=config.keep,
        seeds=torch.tensor([job.seed for job in jobs], device=model.device),
        memory_budget=budget_bytes_on(config.device, config.memory_budget),
        on_step=on_step,
        order=config.order,
        max_new_tokens=jobs[0].room,
        pad_token_id=pad,
        repetition_penalty=config.repetition_penalty,
        num_return_sequences=1,
        num_beams=1,
        tokenizer=tokenizer,
        **({"do_sample": True, **warm, **OTHER_CUTS} if config.temperature else GREEDY),
        **({"stop_strings": list(config.stop)} if config.stop else {}),  # in the place of the model's own
    )
    record = out.record.map(Tensor.cpu)
    return [record[row] for row in range(len(jobs))]


def _ends(model: Any) -> list[int]:
    """The ids that end a text."""
    eos = model.generation_config.eos_token_id
    return eos if isinstance(eos, list) else [eos]


def _named(config: SampleConfig, job: Job, about: dict[str, Any], ends: list[int]) -> dict[str, Any]:
    """A sequence with its prompt, and why it ended."""
    last, count = about["tokens"][-1]["id"], len(about["tokens"])
    if last in ends or (count < job.room and not config.stop):  # at an id, or at a text of its own
        finish = "ended by the model"
    elif config.stop and (count < job.room or any(text in about["text"] for text in config.stop)):
        finish = "ended by --stop"
    else:
        finish = "ended by --max-new-tokens" if count == config.max_new_tokens else "ended by the model's context"
    prompt = {"prompt": job.prompt, "shown_prompt": job.shown, "prompt_tokens": len(job.ids)}
    return {**prompt, "seed": job.seed, "finish": finish, **about}


def _table(record: SampleRecord, about: dict[str, Any], number: int) -> pa.Table:
    """A completion's rows, numbered among all, with what each token adds to the text."""
    table = record[None].to_arrow()
    table = table.set_column(0, "sequence", pa.array([number] * table.num_rows, pa.int32()))
    return table.append_column("text", pa.array([token["text"] for token in about["tokens"]], pa.string()))
