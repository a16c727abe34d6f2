"""The demo's page: answers and unseen text coloured by probability, perplexity, memory and loss, offline."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from ...pages import document, fill, script_value
from ...sample import page as samples
from ...units import format_parameters, one_unit, plural

ASSETS = Path(__file__).with_name("assets")
WHEN = ("before", "after")
SHOWN = 2  # held-out answers that the page colours; all count in the perplexity


def page(summary: dict[str, Any], pictures: dict[str, Path]) -> str:
    """The HTML of a `run`'s summary. pictures: of the run, by name; one that was not drawn is left out."""
    texts = [summary[when][kind][i] for kind, i in _pairs(summary) for when in WHEN]
    title = f"{summary['what']}, before and after {plural(summary['training']['steps'], 'step')}"
    parts = {
        "title": html.escape(title),
        "tiles": "".join(_tile(*tile) for tile in _tiles(summary)),
        "legend": samples.legend(),
        "answers": _table(summary, "answers", 0),
        "read": _table(summary, "read", 2 * len(summary["before"]["answers"])),
        "pictures": "".join(_picture(name, path) for name, path in pictures.items()),
        "trained": _list(summary["questions"]["trained"]),
        "held_out": _list(summary["questions"]["held_out"]),
        "facts": html.escape(_facts(summary)),
        "temperature": f"{summary['temperature']:g}",
        "data": script_value([samples.facts(text) for text in texts]),
        "script": samples.script(),
    }
    own = (ASSETS / "demo.css").read_text(encoding="utf-8")
    return document(title, samples.style() + own, fill(ASSETS / "demo.html", parts))


def _pairs(summary: dict[str, Any]) -> list[tuple[str, int]]:
    """What is shown before and after, in the page's order."""
    read = min(SHOWN, len(summary["before"]["read"]))
    return [("answers", i) for i in range(len(summary["before"]["answers"]))] + [("read", i) for i in range(read)]


def _table(summary: dict[str, Any], kind: str, first: int) -> str:
    """Texts of a kind, before beside after; `first` is the number of the first one among the page's."""
    asked = summary["questions"]["asked" if kind == "answers" else "held_out"]
    rows = [i for name, i in _pairs(summary) if name == kind]
    return "".join(
        f'<article class="card"><h3>{html.escape(asked[i])}</h3><div class="pair">'
        + "".join(_text(when, first + 2 * row + k, kind, summary[when][kind][i]) for k, when in enumerate(WHEN))
        + "</div></article>"
        for row, i in enumerate(rows)
    )


def _text(when: str, number: int, kind: str, text: dict[str, Any]) -> str:
    """A text with what is said beside it: an answer's own perplexity says how sure of itself the model was, no more."""
    said = f"perplexity {text['perplexity']:.3g}"
    if kind == "answers":
        ended = text["tokens"][-1]["special"]
        said = "" if ended else f"cut off after {plural(len(text['tokens']), 'token')}"
    return (
        f'<div><p class="when">{when} <span class="muted">{said}</span></p>'
        f'<p class="text" dir="auto">{samples.spans(number, text)}</p></div>'
    )


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, its number, what it means) of each headline."""
    before, after, training = summary["before"], summary["after"], summary["training"]
    memory = training["step_memory"]
    trained, every = (format_parameters(training[name]) for name in ("trainable_parameters", "parameters"))
    tiles = [
        (
            "perplexity of unseen answers",
            f"{before['perplexity']:.1f} → {after['perplexity']:.1f}",
            f"{before['tokens']} tokens of {len(before['read'])} answers that were not trained on",
        ),
        (
            "training",
            plural(training["tokens"], "token"),
            f"in {plural(training['steps'], 'step')}; LoRA trains {trained}, of {every} in all",
        ),
    ]
    if all("peak_bytes" in found for found in memory.values()):
        ours, dense = memory["logitless"]["peak_bytes"], memory["dense"]["peak_bytes"]
        size = one_unit((ours, dense))
        more = f"{size(dense)}, {dense / max(1, ours):.1f} × as much"
        meaning = f"one step beside the model, its layers' activations included; with dense logits {more}"
        tiles.insert(1, ("memory, logitless", size(ours), meaning))
    return tiles


def _tile(what: str, number: str, meaning: str) -> str:
    what, number, meaning = map(html.escape, (what, number, meaning))
    return f'<div class="card tile"><p class="muted">{what}</p><p class="number">{number}</p><p>{meaning}</p></div>'


def _picture(name: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    alt = {"loss": "the loss of each step", "memory": "memory of one step, logitless and dense"}[name]
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


def _list(questions: list[str]) -> str:
    return "".join(f"<li>{html.escape(question)}</li>" for question in questions)


def _facts(summary: dict[str, Any]) -> str:
    licence = f" Licence of the model: {summary['licence']}." if summary["licence"] else ""
    known = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return f"{known}, {summary['training']['device']}.{licence}"
