"""Prompts, and the embedded reward: a classifier of prose against code, trained on files that no prompt comes from."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError, DataError, OptionError
from ...units import plural
from ..sources.corpus import Remark, documents, ignored, passages
from ..sources.generation import left_padded
from ..sources.packing import HELD_OUT_EVERY, one_in
from ..sources.tokenizer import TextTokenizer
from .config import GradeConfig
from .method import Batch

SPLITS = ("train", "validation", "test")
PER_DOCUMENT = 4
MOST_PROMPTS = 4096
LONGEST_TOKEN = 16  # characters, about
# Of the classifier: what it learns from, its size and its training.
PASSAGES = 1200
LAYERS = 2
STEPS = 80
ROWS = 24
RATE = 3e-3
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Prompts = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Texts:
    """Documents: one list for each split of the prompts, and what the embedded classifier learns from."""

    prompts: dict[str, list[str]]
    reward: list[str]


def texts_of(data: str | None, remark: Remark = ignored) -> Texts:
    """One document in ten validates, one in ten tests. Of the standard library, what `logitless train` holds out of the
    policy's training is the classifier's. remark: hears what `documents` leaves out."""
    whole = [text for text in documents(data, remark)[0] if text]
    held = set(one_in(HELD_OUT_EVERY, whole)[1]) if data is None else set()
    kept = [text for text in dict.fromkeys(whole) if text not in held]  # some files are there twice
    places = {"validation": (3,), "test": (7,), "train": (0, 1, 2, 4, 5, 6, 8, 9)}
    prompts = {name: [x for i, x in enumerate(kept) if i % 10 in places[name]] for name in SPLITS}
    return Texts(prompts, [text for text in dict.fromkeys(whole) if text in held])


def prompts_of(config: GradeConfig, texts: Texts, tokenizer: TextTokenizer) -> Prompts:
    """Token ids of each split's prompts: whole lines of documents, or where these are too long a document's first
    tokens, in an order that the seed gives. Raises DataError."""
    wanted = config.max_steps * config.batch_size * config.gradient_accumulation_steps
    found = {}
    for name in SPLITS:
        size = min(wanted, MOST_PROMPTS) if name == "train" else config.evaluation_prompts
        found[name] = _prompts(config, texts.prompts[name], tokenizer, size)
        Random(f"{config.seed} {name}").shuffle(found[name])
        found[name] = found[name][:size]
        if not found[name]:
            raise DataError(
                f"{config.data_said}: found no prompts for {name}; expected at least 8 documents of more "
                f"than {2 * config.prompt_length} tokens"
            )
    return found


def _prompts(config: GradeConfig, texts: list[str], tokenizer: TextTokenizer, wanted: int) -> list[list[int]]:
    """Those of so many documents, and of further ones as long as there are fewer prompts than wanted."""
    order = Random(config.seed).sample(texts, len(texts))
    room = config.prompt_length - len(tokenizer.opening)
    prompts: list[list[int]] = []
    for at, text in enumerate(order):
        if at >= MOST_PROMPTS // PER_DOCUMENT and len(prompts) >= wanted:
            break
        rows = passages(text, tokenizer, room, config.prompt_length)
        some = Random(config.seed).sample(rows, min(PER_DOCUMENT, len(rows)))
        start = text[: LONGEST_TOKEN * config.prompt_length]
        found = tokenizer.encode([row["prompt"] for row in some] or [start])
        opened = ([*tokenizer.opening, *ids] for ids in found if some or len(ids) > config.prompt_length)
        prompts += (ids[: config.prompt_length] for ids in opened)
    return prompts


def batch_of(prompts: list[list[int]], seeds: Tensor, pad: int, longest: int, device: torch.device) -> Batch:
    """Prompts padded on the left. Raises OptionError for one that is longer than `longest`, the room in the context."""
    width = max(len(ids) for ids in prompts)
    if width > longest:
        raise OptionError(
            f"--prompt-length: a prompt has {plural(width, 'token')}, the model's context leaves room for {longest} "
            "before the completion; shorten the prompts or --completion-length"
        )
    return Batch(*left_padded(prompts, pad, device), seeds.to(device))


def prose_and_code(texts: list[str], lines: int = 6) -> Iterator[tuple[str, int]]:
    """(some lines, 1 for prose or 0 for code) of Python files: docstrings, and all but those and comments."""
    for text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:  # templates and files of other Pythons
            continue
        prose: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
                prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        numbered = list(enumerate(io.StringIO(text, newline=""), 1))  # as `ast` counts: a form feed ends no line
        for label in (1, 0):
            kept = [x for i, x in numbered if (i in prose) == bool(label)]
            kept = [x for x in kept if x.strip() and (label or not x.lstrip().startswith("#"))]
            for begin in range(0, len(kept), lines):
                yield "".join(kept[begin : begin + lines]), label


def train_classifier(
    policy: Any, texts: list[str], tokenizer: TextTokenizer, seed: int, length: int
) -> tuple[Any, float]:
    """(classifier of label 1 for prose, its accuracy on a fifth of the files that it never saw), of the policy's
    architecture with LAYERS layers, on the policy's own embedding, which stays as it is; in float32 on the CPU,
    whatever the policy is. Raises ConfigError, DataError."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    if type(policy.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigError(
            f"transformers has no sequence classifier of {type(policy).__name__}'s architecture to learn the reward: "
            "give --reward-model or --token-reward"
        )
    values = {**policy.config.to_dict(), "num_hidden_layers": LAYERS, "layer_types": None}
    for name in ("nsa", "attn_implementation"):  # sparse attention, whose parameters are in no classifier
        values.pop(name, None)
    config = type(policy.config)(**values)
    config.num_labels, config.pad_token_id = 2, tokenizer.eos_id
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    embedding = policy.get_input_embeddings().weight.detach().to("cpu", torch.float32, copy=True)
    model.get_input_embeddings().weight = nn.Parameter(embedding, False)
    train, test = ([x for i, x in enumerate(texts) if (i % 5 == 0) == held] for held in (False, True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    rows = _rows(train, tokenizer, seed, length)
    for step in range(STEPS):
        ids, labels = _some(rows, Random(f"{seed} {step}"))
        loss = nn.functional.cross_entropy(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    seen = _rows(test, tokenizer, seed, length)
    with torch.no_grad():
        right = [
            int(model(input_ids=torch.tensor([ids])).logits.argmax() == label) for ids, label in seen[: PASSAGES // 4]
        ]
    return model, sum(right) / len(right)


def _rows(texts: list[str], tokenizer: TextTokenizer, seed: int, length: int) -> list[tuple[list[int], int]]:
    """(token ids, label), as many of prose as of code; short ones too, as continuations end where they end."""
    random = Random(seed)
    both: dict[int, list[str]] = {0: [], 1: []}
    for text, label in prose_and_code(texts):
        both[label].append(text)
    size = min(len(both[0]), len(both[1]), PASSAGES // 2)
    if size == 0:
        raise DataError("expected Python files with docstrings to train the reward on, got none; give --reward-model")
    chosen = [(text, label) for label in both for text in random.sample(both[label], size)]
    random.shuffle(chosen)
    ids = tokenizer.encode([text for text, _ in chosen])
    return [(x[:length], label) for x, (_, label) in zip(ids, chosen, strict=True) if x]


def _some(rows: list[tuple[list[int], int]], random: Random) -> tuple[Tensor, Tensor]:
    """A batch of one length, so that nothing is padded: the shortest of its rows, from the start of each."""
    some = sorted(random.sample(rows, min(4 * ROWS, len(rows))), key=lambda row: len(row[0]))
    begin = random.randrange(max(1, len(some) - ROWS + 1))
    some = some[begin : begin + ROWS]
    width = max(1, min(len(ids) for ids, _ in some))
    return torch.tensor([ids[:width] for ids, _ in some]), torch.tensor([label for _, label in some])


def saved_classifier(place: Path, model: Any, tokenizer: TextTokenizer) -> None:
    """The classifier and the tokenizer that it shares with the policy, as --reward-model takes them."""
    model.save_pretrained(place)
    tokenizer.saved.save_pretrained(place)
