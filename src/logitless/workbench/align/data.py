"""Prompts and pairs: taken from a table that has them, or cut from text at line ends; training and held-out apart."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch

from ...errors import ConfigError, DataError
from ...units import plural
from ..common.files import read_lines, readable, write_lines
from ..common.options import code_named
from ..common.written import ROWS_FILE
from ..sources.chat import ASSISTANT, prompt_of
from ..sources.corpus import Remark, Row, documents, ignored, is_chat, passages, table, unsaid
from ..sources.generation import left_padded
from ..sources.packing import HELD_OUT_EVERY, one_in
from ..sources.tokenizer import TextTokenizer, as_chat, prompt_ids
from .config import AlignConfig

HELD_OUT_ROWS = 32  # sampled from (pairs: scored) before and after training
MOST_ROWS = 4096  # cut from text; a longer run sees them again
PER_DOCUMENT = 4  # where there are enough documents, so that rows come from many of them
MOST_PAIRS = 128  # a sample of the model for each; a longer run sees them again
PAIR = ("prompt", "chosen", "rejected")
ANSWERED = ("prompt", "completion")  # preferred to a sample of the model
NO_TOOLS = (None, [], "", "[]", "null")
TAKEN = {  # names by which TRL gives or reads something of its own, and two of self-certainty's
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "image", "images"),
    *("prompt_token_ids", "completion_mask"),
}


def rows_of(
    config: AlignConfig, tokenizer: TextTokenizer, wanted: int, remark: Remark = ignored
) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows). Raises DataError when there are none of either, or for rows of mixed kinds.

    remark: hears what `documents` leaves out.
    """
    given = _table(config, tokenizer, remark)
    train, held = _cut(config, tokenizer, wanted, remark) if given is None else _divide(given)
    what = "prompts" if config.kind.rollouts else "pairs"
    if not train or not held:
        raise DataError(
            f"{config.data_said}: expected {what} to train on and some to hold out, got {len(train)} and "
            f"{len(held)}; give more{'' if given else _lines(config)}"
        )
    if not config.kind.rollouts and "chosen" not in train[0]:  # each costs a sample of the model
        train = Random(config.seed).sample(train, min(wanted, len(train)))
    return train, held[:HELD_OUT_ROWS]


def _lines(config: AlignConfig) -> str:
    lengths = f"--prompt-length {config.prompt_length} and --completion-length {config.completion_length}"
    return f" text, whose lines are within {lengths} tokens"


def check_enough(config: AlignConfig, train: list[Row], ranks: int) -> None:
    """DataError for fewer prompts than a step samples from: TRL would take no step."""
    wanted = config.prompts_per_step(ranks)
    if config.kind.rollouts and len(train) < wanted:
        times = f" times {ranks} ranks" if ranks > 1 else ""
        raise DataError(
            f"{config.data_said}: a step needs {plural(wanted, 'prompt')} (--batch-size "
            f"{config.batch_size} times --gradient-accumulation-steps {config.gradient_accumulation_steps}{times}, "
            f"over --generations-per-prompt {config.generations_per_prompt}), got {len(train)} beside those held out; "
            "give more, or lower the former"
        )


def check_differ(config: AlignConfig, pairs: list[Row], remark: Remark) -> None:
    """DataError where no pair's sides differ. remark: hears how many do not, where others do."""
    alike = sum(pair["chosen"] == pair["rejected"] for pair in pairs)
    told = f"{config.data_said}: chosen and rejected are the same in"
    if alike == len(pairs):
        raise DataError(f"{told} every pair, from which nothing is learned: give pairs whose sides differ")
    if alike:
        remark(f"warning: {told} {alike:,} of {plural(len(pairs), 'pair')}, from which nothing is learned")


def check_room(config: AlignConfig, rows: list[Row], tokenizer: TextTokenizer, positions: int | None) -> None:
    """DataError for a prompt behind which the model has no positions for a whole completion; None: it has any."""
    longest = max(map(len, prompt_ids([row["prompt"] for row in rows], tokenizer)))
    if positions is not None and longest + config.completion_length > positions:
        raise DataError(
            f"{config.data_said}: a prompt has {plural(longest, 'token')}, which with "
            f"--completion-length {config.completion_length} is more than the model's {positions:,} positions: "
            "lower that, or give shorter prompts (--prompt-length, where they are cut from text)"
        )


@torch.no_grad()
def with_rejected(rows: list[Row], model: Any, tokenizer: TextTokenizer, config: AlignConfig) -> list[Row]:
    """Rows with `chosen`, the real continuation or answer, and `rejected`, a sample of the model's own.

    Rows that have both already stay as they are. Chen et al., arXiv 2401.01335.
    """
    torch.manual_seed(config.seed)
    was_training = model.training
    model.eval()
    pairs: list[Row] = []
    for begin in range(0, len(rows), config.batch_size):
        part = rows[begin : begin + config.batch_size]
        if "chosen" in part[0]:
            pairs += part
            continue
        samples = _samples([row["prompt"] for row in part], model, tokenizer, config)
        for row, sample in zip(part, samples, strict=True):
            if sample.strip():
                chosen = row["completion"] if "completion" in row else row["continuation"]
                rejected = [{"role": ASSISTANT, "content": sample}] if isinstance(chosen, list) else sample
                pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    model.train(was_training)
    return pairs


def save(path: Path, train: list[Row], held: list[Row]) -> None:
    """Both lists as JSON lines, so that a resumed run sees the same rows."""
    write_lines(
        path, [{"split": name, "row": row} for name, rows in (("train", train), ("held", held)) for row in rows]
    )


def load(path: Path, config: AlignConfig) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) that `save` wrote. Raises DataError for rows that it did not write."""
    found: dict[str, list[Row]] = {"train": [], "held": []}
    columns = ("prompt",) if config.kind.rollouts else PAIR
    with readable(path):
        for line in read_lines(path):
            row = line["row"]
            found[line["split"]].append(row)
            _check_row(row, columns, str(path))
            if isinstance(row["prompt"], list) != isinstance(found["train"][0]["prompt"], list):
                raise ValueError("text among messages")
        if not found["held"]:
            raise ValueError("no row that is held out")
    return found["train"], found["held"]


def _cut(config: AlignConfig, tokenizer: TextTokenizer, wanted: int, remark: Remark) -> tuple[list[Row], list[Row]]:
    """Passages of text; every twentieth document is held out, as by `logitless train`, or the last rows of a few."""
    texts, held_texts = documents(config.data, remark)
    kept = [text for text in texts if text]
    held = [] if held_texts is None else [text for text in held_texts if text]
    if held_texts is None and len(kept) >= HELD_OUT_EVERY:
        kept, held = one_in(HELD_OUT_EVERY, kept)
    if held:
        return _some(config, kept, tokenizer, wanted), _some(config, held, tokenizer, HELD_OUT_ROWS)
    rows = _some(config, kept, tokenizer, wanted + HELD_OUT_ROWS)
    tail = min(HELD_OUT_ROWS, max(1, len(rows) // HELD_OUT_EVERY))
    return rows[:-tail][:wanted], rows[-tail:]


def _some(config: AlignConfig, texts: list[str], tokenizer: TextTokenizer, wanted: int) -> list[Row]:
    """At most `wanted` passages, from documents in an order that the seed gives."""
    random = Random(config.seed)
    order = random.sample(range(len(texts)), len(texts))
    most = max(PER_DOCUMENT, -(-wanted // max(1, len(texts))))
    rows: list[Row] = []
    for i in order:
        if len(rows) >= wanted:
            break
        found = passages(texts[i], tokenizer, config.prompt_length, config.completion_length)
        rows += random.sample(found, min(most, len(found)))
    return rows[:wanted]


def _divide(given: tuple[list[Row], list[Row] | None]) -> tuple[list[Row], list[Row]]:
    train, held = given
    if held is not None:
        return train, held
    return one_in(min(HELD_OUT_EVERY, max(2, len(train))), train)


def _table(config: AlignConfig, tokenizer: TextTokenizer, remark: Remark) -> tuple[list[Row], list[Row] | None] | None:
    """(rows, held-out rows or None) of a file or directory of prompts or pairs; None for text."""

    def wanted(names: list[str]) -> list[str]:
        return names if "messages" in names or _is_given(dict.fromkeys(names), config) else []

    found = table(config.data, wanted)
    if found is None:
        return None
    form = prompt_of if config.kind.rollouts else _pair_of
    given = [None if split is None else [*split] for split in found]
    rows, held = (None if split is None else [form(row) for row in split] for split in given)
    if not rows or not _is_given(rows[0], config):
        return None
    columns = ("prompt",) if config.kind.rollouts else PAIR
    if columns == PAIR and "completion" in rows[0] and "chosen" not in rows[0]:
        columns = ANSWERED
    every: list[Row] = [*rows, *(held or [])]
    # Functions of a user's own are given the other columns.
    rewarded = config.kind.rollouts and code_named(config.to_dict())
    for i, row in enumerate(every):
        _check_row(row, columns, f"--data {config.data}: row {i}")
        _check_kinds(row, rows[0], columns, f"--data {config.data}: row {i}", tokenizer)
        if rewarded:
            _check_kept(row, f"--data {config.data}: row {i}")
    if isinstance(rows[0]["prompt"], list) and any(row.get("tools") not in NO_TOOLS for x in given for row in x or ()):
        remark(f"--data {config.data}: prompts are written without the tools of their rows")  # as TRL writes them
    if rewarded:
        if any("completion" in row for row in every):
            remark(f"--data {config.data}: TRL gives rewards no column named 'completion': rename it to have it there")
        return rows, held

    def told(some: list[Row]) -> list[Row]:
        return [{name: row[name] for name in columns} for row in some]

    return told(rows), None if held is None else told(held)


def _is_given(row: Row, config: AlignConfig) -> bool:
    """Whether a table whose first row this is has prompts or pairs, and is not of text to cut them from."""
    return "prompt" in row or is_chat(row) or (not config.kind.rollouts and {*PAIR[1:]} <= row.keys())


def _pair_of(row: Row) -> Row:
    """The row with a `prompt`: what chosen and rejected have in common, or all before the assistant's last answer."""
    from trl.data_utils import extract_prompt

    both = [row.get(name) for name in ("chosen", "rejected")]
    if "prompt" not in row and all(x and not unsaid(x) for x in both) and type(both[0]) is type(both[1]):
        return extract_prompt(row)
    found, messages = prompt_of(row), row.get("messages")
    if "prompt" in row or not isinstance(messages, list) or found.get("prompt", messages) == messages:
        return found
    return {"prompt": found["prompt"], "completion": messages[-1:]}


def _check_row(row: Row, columns: tuple[str, ...], where: str) -> None:
    if "messages" in row and "prompt" not in row:  # which `prompt_of` found none in
        raise DataError(f"{where}: messages: {unsaid(row['messages'], text=False)}")
    for name in columns:
        if row.get(name) and (why := unsaid(row[name])):
            raise DataError(f"{where}: {name}: {why}")
    if missing := [name for name in columns if not row.get(name)]:
        raise DataError(
            f"{where} has no {', '.join(missing)}; expected {', '.join(columns)}, or messages that end with the "
            "assistant's answer to them"
        )


def _check_kept(row: Row, where: str) -> None:
    """DataError for a column that rewards cannot be given, or a value that `save` cannot write."""
    for name, value in row.items():
        if name in TAKEN:
            raise DataError(f"{where}: a column named {name!r}, which rewards are given something else by: rename it")
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise DataError(
                f"{where}: column {name!r} must be of text, numbers or lists of them, which {ROWS_FILE} can keep, got "
                f"{type(value).__name__}; write it as text, or leave it out"
            ) from None


def _check_kinds(row: Row, first: Row, columns: tuple[str, ...], where: str, tokenizer: TextTokenizer) -> None:
    """DataError for text among messages; ConfigError for messages that no chat template makes text of."""
    kinds = {True: "messages", False: "text"}
    kind = isinstance(first["prompt"], list)
    other = next((name for name in columns if isinstance(row[name], list) != kind), None)
    if other:
        raise DataError(
            f"{where}: {other} is {kinds[not kind]}, and the first row's prompt is {kinds[kind]}: give all of one kind"
        )
    if not kind:
        return
    if not getattr(tokenizer.saved, "chat_template", None):
        raise ConfigError("prompts of messages need a chat template, and the tokenizer has none: give text instead")
    prompt, *answers = (row[name] for name in columns)
    for name, answer in zip(columns[1:], answers, strict=True):
        if answer[0]["role"] != ASSISTANT:
            raise DataError(f"{where}: {name} must begin with a message of the assistant, got {answer[0]['role']}")
    try:
        as_chat(prompt, tokenizer.saved)
        for answer in answers:
            as_chat([*prompt, *answer], tokenizer.saved, to_answer=False)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _samples(prompts: list[Any], model: Any, tokenizer: TextTokenizer, config: AlignConfig) -> list[str]:
    """One sampled continuation of each prompt."""
    ids, mask = left_padded(prompt_ids(prompts, tokenizer), model.generation_config.pad_token_id, model.device)
    made = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=config.temperature,
        top_k=0,
        max_new_tokens=config.completion_length,
        min_new_tokens=1,
    )
    return tokenizer.saved.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
