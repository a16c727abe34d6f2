"""Conversations to learn from: their tokens as the chat template has them, and which of these the assistant says."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np

from ...errors import ConfigError, DataError
from ...units import plural
from .corpus import Row, unsaid
from .packing import HELD_OUT_EVERY, Stream, one_in
from .tokenizer import TemplateError, TextTokenizer, Tools, UnreadError, as_chat, as_marked_chat, reading

ASSISTANT = "assistant"
OPEN_ROWS = 512  # that are looked through for room: all of them would take time that grows as a square
MARKED = re.compile(r"\{%-?\s*generation\b")  # a template that itself marks what the assistant says


class NotToldApart(DataError):
    """What the assistant says cannot be found in a conversation as its chat template has it."""


@dataclass(frozen=True)
class Example:
    """A conversation's ids (length,) uint32, and which of them the loss may be of, (length,) bool."""

    ids: np.ndarray
    said: np.ndarray

    def cut(self, length: int) -> Example:
        return Example(self.ids[:length], self.said[:length])


def prompt_of(row: Row) -> Row:
    """The row with a `prompt`, which of a conversation is all before the assistant's last answer, in its place."""
    messages: Any = row.get("messages")
    if "prompt" in row or unsaid(messages, text=False):
        return row
    prompt = messages[:-1] if messages and messages[-1]["role"] == ASSISTANT else messages
    return {"prompt": prompt, **{name: value for name, value in row.items() if name != "messages"}}


def example(row: Row, tokenizer: TextTokenizer, where: str, every: bool = False) -> Example:
    """A row as an example, whose loss is of the assistant's tokens, or of every one.

    Raises DataError that says `where` for a row without an answer, or of another form; NotToldApart; TemplateError for
    one that the template fails at, UnreadError for one that the tokenizer does.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    try:
        if "messages" not in row and isinstance(prompt, str) and isinstance(completion, str):
            found = _of_text(prompt, completion, tokenizer)
            return replace(found, said=np.ones_like(found.said)) if every else found
        messages = _messages(row, where)
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError(f"--data {where}: no message of the assistant, whose tokens would count")
        return _of_messages(messages, _tools(row, where), tokenizer, where, every)
    except (TemplateError, UnreadError) as error:
        raise type(error)(f"--data {where}: {error}") from None


def _messages(row: Row, where: str) -> list[dict[str, Any]]:
    """The whole conversation of a row. Raises DataError that says `where`."""
    names = ("prompt", "completion") if row.get("messages") is None else ("messages",)
    given: dict[str, Any] = {name: row.get(name) for name in names}
    if None in given.values():
        raise DataError(
            f"--data {where}: expected messages, each with role and content, or a prompt and a completion of text or "
            "messages"
        )
    for name, value in given.items():
        if why := unsaid(value, text=name != "messages"):
            raise DataError(f"--data {where}: {name}: {why}")
    roles = {"prompt": "user", "completion": ASSISTANT}
    said = ([{"role": roles[n], "content": x}] if isinstance(x, str) else x for n, x in given.items())
    return [message for part in said for message in part]


def _tools(row: Row, where: str) -> Tools:
    """What a row's conversation may call, often kept as JSON. Raises DataError that says `where`."""
    given: Any = row.get("tools")
    with suppress(ValueError, RecursionError):
        given = json.loads(given or "null") if isinstance(given, str) else _without_nulls(given)
    if given is None or (isinstance(given, list) and all(isinstance(tool, dict) for tool in given)):
        return given or None  # templates announce tools where the list is empty, too
    raise DataError(f"--data {where}: tools: expected a list of objects, or JSON of one, got {reprlib.repr(given)}")


def _without_nulls(value: Any) -> Any:
    """Objects without what is null: Arrow, which has one form for all rows, gives each tool the parameters of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(x) for name, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def _of_text(prompt: str, completion: str, tokenizer: TextTokenizer) -> Example:
    """Plain text, ended by the end-of-text token, without a template."""
    before, after = tokenizer.encode([prompt, completion])
    ids = [*tokenizer.opening, *before, *after, tokenizer.eos_id]
    said = np.arange(len(ids)) >= len(ids) - len(after) - 1
    return Example(np.array(ids, dtype=np.uint32), said)


def _of_messages(
    messages: list[dict[str, Any]], tools: Tools, tokenizer: TextTokenizer, where: str, every: bool
) -> Example:
    saved = tokenizer.saved
    template = saved.chat_template
    if not template:
        raise ConfigError("conversations need a chat template, and the tokenizer has none: give text instead")
    if isinstance(template, str) and MARKED.search(template) and not every:
        text, spans = as_marked_chat(messages, saved, tools)
        ids, begins, ends = _encoded(text, saved)
        said = [(begins < end) & (ends > begin) for begin, end in spans]
        return Example(ids, np.any([np.zeros(len(ids), bool), *said], axis=0))
    write = partial(as_chat, saved=saved, tools=tools)
    text = write(messages, to_answer=False)
    ids, begins, ends = _encoded(text, saved)
    if every:
        return Example(ids, np.ones(len(ids), bool))
    said = np.zeros(len(ids), bool)
    for begin, behind, end in _spans(messages, text, write, where):
        inside = (begins >= begin) & (ends <= end)
        last = np.flatnonzero(inside & (begins >= behind) & (ids == tokenizer.eos_id))
        said |= inside & (np.arange(len(ids)) <= last[-1]) if len(last) else inside  # nothing behind the answer's end
    return Example(ids, said)


def _encoded(text: str, saved: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids of a conversation that a template wrote, and the characters where each begins and ends."""
    with reading(saved):
        encoded = saved(text, add_special_tokens=False, split_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
    return np.array(encoded["input_ids"], np.uint32), offsets[:, 0], offsets[:, 1]


def _spans(
    messages: list[dict[str, Any]], text: str, write: Callable[..., str], where: str
) -> Iterable[tuple[int, int, int]]:
    """Where in the text the assistant's messages stand, found by writing the conversation up to each of them.

    From, behind their content (which may quote an end of text), to; from, from, to where that is written otherwise.
    """
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            until = write(messages[: number + 1], to_answer=False)
            before = write(messages[:number]) if number else _opening(until, write)
            if not text.startswith(until) or not until.startswith(before):
                raise NotToldApart(
                    f"--data {where}: the chat template writes earlier messages anew as a conversation goes on, so "
                    "that the assistant's cannot be told apart: give one answer in each conversation"
                )
            content = message.get("content")
            content = content.strip() if isinstance(content, str) else ""
            at = until.find(content, len(before))
            yield len(before), len(before) if at < 0 else at + len(content), len(until)


def _opening(text: str, write: Callable[..., str]) -> str:
    """What the template writes before an answer that comes first, such as a system prompt of its own."""
    others = [write([{"role": ASSISTANT, "content": content}], to_answer=False) for content in "ab"]
    return commonprefix([text, *others])  # noqa: RUF071 (of texts, not paths)


def hold_out(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """(train, held out): every twentieth conversation is held out, or the last of a few. Raises DataError."""
    if len(examples) < 2:
        raise DataError(f"expected two conversations or more, one to train on and one to hold out, got {len(examples)}")
    if len(examples) < HELD_OUT_EVERY:
        return list(examples[:-1]), list(examples[-1:])
    return one_in(HELD_OUT_EVERY, examples)


def packed(examples: Iterable[Example], length: int, filler: int) -> tuple[Stream, list[str]]:
    """Whole conversations in rows of `length` tokens, and what is to be said about those that do not fit.

    Each goes into the first of the latest rows that has room for it; the rest of a row is `filler`, a document of its
    own that no loss is of. A conversation that is longer than a row loses its end.
    """
    rows: list[list[Example]] = []
    room: list[int] = []
    count, cut, lost, silent = 0, 0, 0, 0
    for each in examples:
        count, long = count + 1, len(each.ids) - length
        if long > 0:
            each, cut, lost = each.cut(length), cut + 1, lost + long
        if not each.said[1:].any():
            silent += 1
            continue
        recent = range(max(0, len(rows) - OPEN_ROWS), len(rows))
        at = next((i for i in recent if room[i] >= len(each.ids)), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(length)
        rows[at].append(each)
        room[at] -= len(each.ids)
    kept = [part for row, free in zip(rows, room, strict=True) for part in (*row, _filler(free, filler))]
    of, remarks = f"of {plural(count, 'conversation')}", []
    if cut:
        ends = f"the last {plural(lost, 'token')} cut off, which a larger --context-length keeps"
        remarks.append(f"{cut:,} {of} longer than {plural(length, 'token')}: {ends}")
    if silent:
        remarks.append(f"{silent:,} {of} without an answer in the first {plural(length, 'token')}: left out")
    return Stream.of([part.ids for part in kept], [part.said for part in kept]), remarks


def _filler(count: int, token: int) -> Example:
    return Example(np.full(count, token, np.uint32), np.zeros(count, bool))
