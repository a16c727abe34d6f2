"""Sampled text as one HTML file that opens offline: each token with its probability, rank, entropy and alternatives."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from ..pages import document, fill, script_value
from ..units import plural
from ..versions import version_of
from .shown import class_names, class_of, percent

ASSETS = Path(__file__).with_name("assets")


def page(summary: dict[str, Any]) -> str:
    """The HTML. The text is there without its script, which adds what is shown of a token; nothing is fetched."""
    title = f"{summary['model']}, sampled"
    own = version_of("logitless")
    parts = {
        "title": html.escape(title),
        "script": script(),
        "settings": html.escape(_settings(summary["options"])),
        "legend": legend(),
        "sequences": "\n".join(_sequence(i, s) for i, s in enumerate(summary["sequences"])),
        "data": script_value([facts(sequence) for sequence in summary["sequences"]]),
        "footer": f"Made by logitless {own}. Probabilities are the model's own, before temperature.",
    }
    return document(title, style(), fill(ASSETS / "sample.html", parts))


def style() -> str:
    """What colours tokens, for a page that has some."""
    return (ASSETS / "sample.css").read_text(encoding="utf-8")


def script() -> str:
    """What tells about a token under the pointer; before it stand `sequences`, the `facts` of each text."""
    return (ASSETS / "sample.js").read_text(encoding="utf-8")


def legend() -> str:
    """The colours and what they stand for."""
    return "".join(f'<span class="p{i}">{name}</span>' for i, name in enumerate(class_names()))


def spans(number: int, sequence: dict[str, Any]) -> str:
    """A sequence's tokens, coloured; `number` is its place among the page's `sequences`."""
    return "".join(_token(number, t, token) for t, token in enumerate(sequence["tokens"]))


def _settings(options: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in options.items())


def _sequence(number: int, sequence: dict[str, Any]) -> str:
    tokens = spans(number, sequence)
    count, perplexity = len(sequence["tokens"]), sequence["perplexity"]
    said = f"{plural(count, 'token')}, perplexity {perplexity:.4g}, {sequence['finish']}"
    return (
        f'<section class="card"><h2>Completion {number + 1}</h2>'
        f'<p class="text" dir="auto"><span class="prompt">{html.escape(sequence["shown_prompt"])}</span>{tokens}</p>'
        f'<p class="muted">{html.escape(said)}</p></section>'
    )


def _token(number: int, t: int, token: dict[str, Any]) -> str:
    """A token's place in the text. One that only begins a character shows its bytes, which are no part of the text."""
    kind = f"t p{class_of(math.exp(token['logprob']))}" + (" special" if token["special"] else "")
    place = f'data-s="{number}" data-t="{t}"'
    if not token["shown"]:
        return f'<span class="{kind} part" {place} data-bytes="{html.escape(token["name"])}"></span>'
    text = html.escape(token["shown"]).replace("\n", '<i class="break"></i>\n')
    return f'<span class="{kind}" {place}>{text}</span>'


def facts(sequence: dict[str, Any]) -> list[dict[str, Any]]:
    """What the script shows of each token, in words."""
    return [
        {
            "name": token["name"],
            "id": token["id"],
            "probability": percent(math.exp(token["logprob"])),
            "drawn": percent(math.exp(token["behaviour_logprob"])),
            "rank": f"{token['rank']:,}",
            "entropy": f"{token['entropy']:.2f} nats",
            "rest": percent(max(0.0, token["tail_mass"])),
            "best": [
                {
                    "name": other["name"],
                    "probability": percent(math.exp(other["logprob"])),
                    "share": round(math.exp(other["logprob"]), 6),
                    "own": other["id"] == token["id"],
                }
                for other in token["top_logprobs"]
            ],
        }
        for token in sequence["tokens"]
    ]
