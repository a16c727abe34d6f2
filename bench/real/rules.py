"""A rule that needs no model: text without the letter e, as a number for a token and for whole completions."""

from collections.abc import Sequence
from typing import Any


def without_e(token: str) -> float:
    """1 for a token without the letter, else 0: `--token-reward` takes the mean over a continuation's tokens."""
    return float("e" not in token.lower())


def words_without_e(completions: Sequence[Any], **_: Any) -> list[float]:
    """The share of a completion's words without the letter; 0 where it has no word."""
    texts = [x if isinstance(x, str) else "".join(str(m.get("content") or "") for m in x) for x in completions]
    return [_share(text.split()) for text in texts]


def _share(words: list[str]) -> float:
    return sum(without_e(word) for word in words) / len(words) if words else 0.0
