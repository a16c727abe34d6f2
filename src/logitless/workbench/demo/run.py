"""`run`: a real model scored and sampled, fine-tuned on questions about this package, scored and sampled again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from rich.console import Console

from ...errors import ConfigError, OptionError
from ...integrations.transformers.generation import generate
from ...integrations.transformers.scoring import score
from ...models.pretrained import PACKAGES
from ...sample.shown import to_dict
from ...units import perplexity
from ...versions import versions
from ..common.device import device_of
from ..common.files import write_text
from ..common.say import say
from ..runs.trainer import quiet
from ..sft.config import TrainConfig
from ..sft.run import run as train
from ..sources.chat import example
from ..sources.corpus import Row
from ..sources.model import load_model, load_tokenizer, resolve_trained
from ..sources.tokenizer import TextTokenizer, chat_ids
from .config import PAGE, TEXT, TRAINED, DemoConfig
from .page import page

SCHEMA = 1
CHATS = Path(__file__).with_name("chat.jsonl")
HELD_OUT_EVERY, HELD_OUT_FIRST = 6, 3  # of the questions: those that are never trained on
QUESTIONS = ("Tell me about logitless.", "My logits do not fit into memory. What can I do?")  # in words of no row
RANK, LENGTH, BATCH = 16, 256, 2
TEMPERATURE, BEST = 0.5, 10


def run(config: DemoConfig, console: Console | None = None) -> dict[str, Any]:
    """Does all of it and returns the summary, which also is what the page `demo.html` shows.

    Writes into one directory: text (the questions, as `datasets` saves them), train (a run of `logitless train`) and
    the page. Raises LogitlessError for bad input.
    """
    console = console or Console(stderr=True)
    quiet()
    source = resolve_trained(config.check().model, "show")
    tokenizer = load_tokenizer(source)
    if not tokenizer.saved.chat_template:
        raise ConfigError(
            f"--model {config.model}: the demo expects a chat template, its tokenizer has none; try smollm2"
        )
    rows, held = questions()
    found = [example(row, tokenizer, "the demo's questions") for row in held]
    place = _place(config.output_dir)
    say(console, f"{config.model}, before: answering questions and reading answers that it has not seen ...")
    before = _look(config, source.name, tokenizer, found)
    _save(place / TEXT, rows, held)
    trained = train(_training(config, place), console)
    say(console, "after: the same questions and answers ...")
    after = _look(config, trained["checkpoint"], tokenizer, found)
    summary = {
        "schema": SCHEMA,
        "model": config.model,
        "what": PACKAGES[config.model].what if config.model in PACKAGES else config.model,
        "licence": PACKAGES[config.model].licence if config.model in PACKAGES else None,
        "questions": {
            "asked": list(QUESTIONS),
            "trained": [_asked(row) for row in rows],
            "held_out": [_asked(row) for row in held],
        },
        "temperature": TEMPERATURE,
        "before": before,
        "after": after,
        "training": trained,
        "versions": versions("torch", "transformers"),
        "output_dir": str(place),
        "page": str(place / PAGE),
    }
    pictures = {name: place / TRAINED / f"{name}.png" for name in ("loss", "memory")}
    write_text(place / PAGE, page(summary, {name: path for name, path in pictures.items() if path.exists()}))
    return summary


def questions() -> tuple[list[Row], list[Row]]:
    """(those to train on, those held out): this package's own conversations about itself."""
    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    held = range(HELD_OUT_FIRST, len(rows), HELD_OUT_EVERY)
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in held]


def _asked(row: Row) -> str:
    return row["messages"][0]["content"]


def _place(wanted: Path | None) -> Path:
    """A new directory: the one that is wanted, or the first free one. Raises OptionError."""
    places = (Path("runs") / ("demo" if number == 1 else f"demo-{number}") for number in count(1))
    place = next(path for path in places if not path.exists()) if wanted is None else wanted
    try:
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise OptionError(f"--output-dir {place} is not empty: choose another")
    except OSError as error:
        raise OptionError(f"--output-dir {place}: {error.strerror}") from None
    return place


def _save(place: Path, rows: list[Row], held: list[Row]) -> None:
    parts: Any = {"train": Dataset.from_list(rows), "validation": Dataset.from_list(held)}
    DatasetDict(parts).save_to_disk(str(place))


def _training(config: DemoConfig, place: Path) -> TrainConfig:
    return TrainConfig(
        model=config.model,
        data=str(place / TEXT),
        output_dir=place / TRAINED,
        context_length=LENGTH,
        batch_size=BATCH,
        max_steps=config.max_steps,
        learning_rate=config.learning_rate,
        lora_rank=RANK,
        gradient_checkpointing=True,
        loss="logitless",
        memory_budget=config.memory_budget,
        seed=config.seed,
        device=config.device,
    )


def _look(config: DemoConfig, name: str, tokenizer: TextTokenizer, found: Sequence[Any]) -> dict[str, Any]:
    """What a model answers, and what it makes of held-out answers: perplexity, and each token's distribution."""
    model = load_model(resolve_trained(name, "show")).eval().to(device_of(config.device))
    read = [_read(model, each, tokenizer) for each in found]
    nats = [-token["logprob"] for text in read for token in text["tokens"]]
    return {
        "perplexity": perplexity(sum(nats) / len(nats)),
        "tokens": len(nats),
        "read": read,
        "answers": _answers(config, model, tokenizer),
    }


def _read(model: Any, each: Any, tokenizer: TextTokenizer) -> dict[str, Any]:
    """A held-out answer's tokens, as the model expects them after the question."""
    ids = torch.from_numpy(each.ids.astype("int64"))[None].to(model.device)
    record = score(model, {"input_ids": ids}, keep=BEST)[0].map(torch.Tensor.cpu)
    said = torch.from_numpy(each.said)
    begin = int(said.int().argmax())
    record.token[~said] = -1
    return to_dict(record, tokenizer.saved, each.ids[:begin].tolist())


def _answers(config: DemoConfig, model: Any, tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """An answer to each of QUESTIONS, with its record."""
    out = []
    for number, question in enumerate(QUESTIONS):
        ids = chat_ids([{"role": "user", "content": question}], tokenizer.saved)
        made = generate(
            model,
            {"input_ids": torch.tensor([ids], device=model.device)},
            keep=BEST,
            seeds=torch.tensor([config.seed + number], device=model.device),
            max_new_tokens=config.max_new_tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            pad_token_id=tokenizer.eos_id,
        )
        record = made.record.map(torch.Tensor.cpu)[0]
        out.append(to_dict(record, tokenizer.saved, ids))
    return out
