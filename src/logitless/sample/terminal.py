"""Sampled text on a terminal: each token coloured by its probability, and a table of what else it might have been."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .described import class_names, class_of, percent

# Ink and paper of each class of probability, both given: legible on dark and on light terminals.
STYLES = ("", "#000000 on #fff3b0", "#000000 on #fdc877", "#000000 on #f4813f", "#ffffff on #b10026")
SPECIAL, FAINT = "reverse dim", "dim"


def coloured(sequence: dict[str, Any]) -> Text:
    """The text behind its prompt. Tokens that share a character share a colour, of their probabilities' product."""
    out = Text().append(sequence["shown_prompt"], FAINT)
    for text, special, probability in _characters(sequence["tokens"]):
        style = SPECIAL if special else STYLES[class_of(probability)]
        for line in text.splitlines(keepends=True):
            out.append(line.rstrip("\n").replace("\t", "→   "), style)
            if line.endswith("\n"):
                out.append("↵", style or FAINT)
                out.append("\n")
    return out


def _characters(tokens: list[dict[str, Any]]) -> Iterator[tuple[str, bool, float]]:
    """(text, special, probability) of each run of tokens that ends with whole characters."""
    total = 0.0
    for token in tokens:
        total += token["logprob"]
        if token["shown"] or token["special"]:
            yield token["shown"], token["special"], math.exp(total)
            total = 0.0


def legend() -> Text:
    """Which colour stands for which probability."""
    out = Text().append("probability  ", FAINT)
    for style, name in zip(STYLES, class_names(), strict=True):
        out.append(f" {name} ", style)
        out.append(" ")
    return out


def alternatives(sequence: dict[str, Any]) -> Table:
    """A row per token: its probability, rank and entropy, and the best entries other than itself."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, side in (("#", "right"), ("token", "left"), ("probability", "right"), ("rank", "right")):
        table.add_column(name, justify=side, no_wrap=name != "token", overflow="fold")  # type: ignore[arg-type]
    table.add_column("entropy", justify="right", no_wrap=True)
    table.add_column("instead", overflow="fold")
    for t, token in enumerate(sequence["tokens"], 1):
        probability = math.exp(token["logprob"])
        table.add_row(
            str(t),
            Text(token["name"], style=SPECIAL if token["special"] else STYLES[class_of(probability)]),
            percent(probability),
            f"{token['rank']:,}",
            f"{token['entropy']:.2f}",
            _instead(token),
        )
    return table


def _instead(token: dict[str, Any]) -> Text:
    """The best entries other than the token, each with its probability."""
    out = Text()
    for other in token["top_logprobs"]:
        if other["id"] != token["id"]:
            out.append(other["name"])
            out.append(f" {percent(math.exp(other['logprob']))}   ", FAINT)
    return out


def show(summary: dict[str, Any], console: Console, with_alternatives: bool) -> None:
    """Every sequence, coloured; its numbers; with its alternatives where they are asked for."""
    for sequence in summary["sequences"]:
        parts: list[Any] = [coloured(sequence)]
        if with_alternatives:
            parts += ["", alternatives(sequence)]
        count, perplexity = len(sequence["tokens"]), sequence["perplexity"]
        said = f"{count} token{'' if count == 1 else 's'}, perplexity {perplexity:.4g}, {sequence['finish']}"
        console.print(Group(*parts, Text(said, style=FAINT)), highlight=False, markup=False, emoji=False)
        console.print()
    console.print(legend())
