"""Sampled text on a terminal: each token coloured by its probability, and a table of what else it might have been."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..printable import shown
from ..units import plural
from .record import SampleRecord
from .shown import class_names, class_of, percent
from .text import Speller

# Ink and paper of each class of probability, both given: legible on dark and on light terminals.
STYLES = ("", "#000000 on #fff3b0", "#000000 on #fdc877", "#000000 on #f4813f", "#ffffff on #b10026")
SPECIAL, FAINT = "reverse dim", "dim"
GAP = "   "


class Painter:
    """Tokens as coloured text; those that share a character share a colour, of their probabilities' product."""

    def __init__(self) -> None:
        self.logprob = 0.0

    def __call__(self, text: str, special: bool, logprob: float) -> Text:
        """What a token adds: nothing, where a later one completes the character."""
        out = Text()
        self.logprob += logprob
        if not text and not special:
            return out
        style = SPECIAL if special else STYLES[class_of(math.exp(self.logprob))]
        self.logprob = 0.0
        for line in text.splitlines(keepends=True):
            out.append(line.rstrip("\n").replace("\t", "→   "), style)
            if line.endswith("\n"):
                out.append("↵", style or FAINT)
                out.append("\n")
        return out


def coloured(sequence: dict[str, Any]) -> Text:
    """The text behind its prompt."""
    out, painter = Text().append(sequence["shown_prompt"], FAINT), Painter()
    for token in sequence["tokens"]:
        out.append_text(painter(token["shown"], token["special"], token["logprob"]))
    return out


@contextmanager
def streamed(
    console: Console, tokenizer: Any, prompt: str, before: Sequence[int]
) -> Iterator[Callable[[SampleRecord], None]]:
    """Writes one completion token by token: what it yields takes the record of each step, (1,).

    prompt: what is shown of it; before: its ids. The line is ended whatever ends the completion.
    """
    speller, painter = Speller(tokenizer, before), Painter()

    def write(text: Text) -> None:
        console.print(text, end="", soft_wrap=True, highlight=False)

    def put(step: SampleRecord) -> None:
        piece = speller.add(int(step.token))
        write(painter(shown(piece.text), piece.special, float(step.logprob)))

    write(Text(prompt, FAINT))
    try:
        yield put
    finally:
        if speller.pending:  # ends within a character
            write(painter(shown(speller.rest), False, 0.0))
        console.print()


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


def _instead(token: dict[str, Any]) -> Whole:
    """The best entries other than the token, each with its probability."""
    others = [other for other in token["top_logprobs"] if other["id"] != token["id"]]
    return Whole([Text.assemble(x["name"], (f" {percent(math.exp(x['logprob']))}", FAINT)) for x in others])


class Whole:
    """Pieces of text on lines that end between two of them only: Text ends lines at any space, no-break ones too."""

    def __init__(self, pieces: list[Text]) -> None:
        self.pieces = pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text()
        for piece in self.pieces:
            if line and line.cell_len + len(GAP) + piece.cell_len > options.max_width:
                yield line
                line = Text()
            line.append(GAP if line else "").append_text(piece)
        yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [piece.cell_len for piece in self.pieces] or [0]
        return Measurement(max(widths), sum(widths) + len(GAP) * (len(widths) - 1)).with_maximum(options.max_width)


def show(summary: dict[str, Any], console: Console, with_alternatives: bool, written: bool = False) -> None:
    """Every sequence, coloured, unless its text is `written`; its numbers; its alternatives where asked for."""
    for sequence in summary["sequences"]:
        parts: list[Any] = [] if written else [coloured(sequence)]
        if with_alternatives:
            parts += ["", alternatives(sequence)]
        count, perplexity = len(sequence["tokens"]), sequence["perplexity"]
        said = f"{plural(count, 'token')}, perplexity {perplexity:.4g}, {sequence['finish']}"
        console.print(Group(*parts, Text(said, style=FAINT)), highlight=False, markup=False, emoji=False)
        console.print()
    console.print(legend())
