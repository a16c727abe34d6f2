"""A sampled sequence in words and numbers: what the terminal, the page and JSON show of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..printable import shown
from .record import SampleRecord
from .text import name_of, pieces, raw_name

# Lower edges of the classes of probability that colours stand for; below the last is a class of its own.
CLASSES = (0.9, 0.5, 0.2, 0.05)


def to_dict(record: SampleRecord, tokenizer: Any, before: Sequence[int]) -> dict[str, Any]:
    """One sequence's text and tokens, as JSON values. Log-probs, entropies and the best entries are raw.

    record: one sequence, (T,); tokenizer: transformers'; before: the prompt's ids. A token's `name` is what it is
    called alone, its `text` what it adds in its place, nothing where a later token completes the character.
    """
    written = record[(record.token >= 0).nonzero().squeeze(1)]
    ids = written.token.tolist()
    parts = pieces(tokenizer, before, ids)
    names: dict[int, tuple[str, str]] = {}

    def about(token: int) -> dict[str, Any]:
        if token not in names:
            names[token] = raw_name(tokenizer, token), name_of(tokenizer, token)
        return {"id": token, "token": names[token][0], "name": names[token][1]}

    best = list(zip(written.topk_ids.tolist(), written.topk_logprob.tolist(), strict=True))
    columns = {
        "logprob": written.logprob.tolist(),
        "behaviour_logprob": written.behaviour_logprob.tolist(),
        "rank": written.rank.tolist(),
        "entropy": written.entropy.tolist(),
        "self_certainty": written.self_certainty.tolist(),
        "tail_mass": written.tail_mass.tolist(),
    }
    tokens = [
        about(token)
        | {"text": piece.text, "shown": shown(piece.text), "special": piece.special}
        | {name: column[t] for name, column in columns.items()}
        | {"top_logprobs": [about(i) | {"logprob": x} for i, x in zip(*best[t], strict=True)]}
        for t, (token, piece) in enumerate(zip(ids, parts, strict=True))
    ]
    return {
        "text": "".join(piece.text for piece in parts if not piece.special),
        "perplexity": float(written.perplexity),
        "tokens": tokens,
    }


def class_of(probability: float) -> int:
    """Which class of CLASSES a probability belongs to, 0 the most certain."""
    return next((i for i, edge in enumerate(CLASSES) if probability >= edge), len(CLASSES))


def class_names() -> list[str]:
    """What the classes are called."""
    edges = [f"{100 * edge:g}" for edge in CLASSES]
    return [f"≥ {edges[0]} %", *(f"{low}–{high} %" for high, low in pairwise(edges)), f"< {edges[-1]} %"]


def percent(probability: float) -> str:
    """A probability for people: 99.9 %, 12.3 %, 0.0045 %."""
    return f"{100 * probability:.1f} %" if probability >= 1e-3 else f"{100 * probability:.2g} %"
