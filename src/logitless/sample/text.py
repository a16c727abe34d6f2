"""Tokens as text: what each adds to what stands before it, what it is called alone, and how to show it safely."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..printable import shown

BROKEN = "\ufffd"  # what decoding puts where bytes are no whole character
LONGEST = 4  # bytes of a character in UTF-8
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MOST_SPACES = 4  # that are written one by one
MARKS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True)
class Piece:
    """A token in its place: the text that it completes ("" where a later token completes the character)."""

    text: str
    special: bool


class Speller:
    """The text that each token adds to what stands before it, as tokens come.

    tokenizer: transformers'; before: the ids that come first. A token that ends within a character adds nothing, the
    one that completes the character adds it.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        self.tokenizer, self.special = tokenizer, set(tokenizer.all_special_ids)
        self.known: list[int] = list(before[-2 * LONGEST :])
        self.pending: list[int] = []
        self.start = self.text = _decoded(tokenizer, self.known)

    def add(self, token: int) -> Piece:
        """What the next token adds."""
        self.pending.append(token)
        self.text = _decoded(self.tokenizer, self.known + self.pending)
        special = token in self.special
        whole = not self.text.endswith(BROKEN) or len(self.pending) >= LONGEST or special
        piece = Piece(self.rest if whole else "", special)
        if whole:
            self.known, self.pending = self.pending, []
            self.start = self.text = _decoded(self.tokenizer, self.known)
        return piece

    @property
    def rest(self) -> str:
        """What tokens have begun and none has completed."""
        return self.text[len(self.start) :]


def pieces(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> list[Piece]:
    """What each of `ids` adds to the text of `before`; the texts of all together are what decoding gives."""
    speller = Speller(tokenizer, before)
    found = [speller.add(token) for token in ids]
    if speller.pending:  # ends within a character
        found[-1] = Piece(speller.rest, found[-1].special)
    return found


def name_of(tokenizer: Any, token: int) -> str:
    r"""A token by itself, on one line: `␣the`, `\n`, `<eos>`, and bytes that are no whole character as `\xe4\xb8`."""
    return shown_alone(raw_name(tokenizer, token))


def raw_name(tokenizer: Any, token: int) -> str:
    """A token's own text; bytes that are no whole character escaped."""
    stored = tokenizer.convert_ids_to_tokens(token)
    if stored is None:
        return f"<{token}>"  # a row of the head that the tokenizer does not know
    if token in tokenizer.all_special_ids:
        return stored
    text = _decoded(tokenizer, [token])
    if BROKEN not in text:
        return " " + text if stored.startswith("\u2581") and not text.startswith(" ") else text
    one = BYTE.fullmatch(stored)
    if one:
        return f"\\x{one[1].lower()}"
    table = _byte_alphabet()
    if all(letter in table for letter in stored):
        return bytes(table[letter] for letter in stored).decode("utf-8", "backslashreplace")
    return text


def byte_count(tokenizer: Any, ids: Sequence[int]) -> int:
    """How many bytes of text tokens stand for, also where they begin or end within a character; special ones: none."""
    special = set(tokenizer.all_special_ids)
    ids = [i for i in ids if i not in special]
    text = _decoded(tokenizer, ids)
    if BROKEN not in text:
        return len(text.encode())
    stored, table = [str(name) for name in tokenizer.convert_ids_to_tokens(ids)], _byte_alphabet()
    rest = [i for i, name in zip(ids, stored, strict=True) if not BYTE.fullmatch(name)]
    if len(rest) == len(ids) and all(letter in table for name in stored for letter in name):
        return sum(map(len, stored))
    return len(ids) - len(rest) + len(_decoded(tokenizer, rest).encode())


def shown_alone(text: str) -> str:
    """Text that is safe to print on one line, its outer spaces visible: `␣the`, `␣×7`."""
    marked = shown("".join(MARKS.get(letter, letter) for letter in text))
    inner = marked.strip(" ")
    lead = len(marked) - len(marked.lstrip(" "))
    tail = len(marked) - lead - len(inner)
    return _spaces(lead) + inner + _spaces(tail)


def _spaces(count: int) -> str:
    return f"␣×{count}" if count > MOST_SPACES else "␣" * count


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@cache
def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies (GPT-2's and its heirs) write bytes with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
