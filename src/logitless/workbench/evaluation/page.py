"""The page of an evaluation: its numbers, curves and hardest documents, offline."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...pages import document, fill
from ...units import format_perplexity, plural
from ...versions import version_of
from ..common.files import remove_leftovers, strict_json, write_text
from ..scoring.summary import measured_rows
from .charts import Axis, Chart
from .config import SUMMARY, EvalConfig
from .report import metric_value, metrics_of, ratio_value, rows_of_tasks, scored_documents, table_rows

ASSETS = Path(__file__).with_name("assets")
ROOM = 1.08  # of an axis above the highest number


def page(summary: dict[str, Any]) -> str:
    """The HTML of a `run`'s summary; nothing is fetched."""
    options = summary["options"]
    other = f" against {options['against']}" if options["against"] else ""
    title = f"{options['model']}{other}, evaluated on {Path(options['data']).name}"
    parts = {
        "title": html.escape(title),
        "tiles": "".join(_tile(*tile) for tile in _tiles(summary)),
        "charts": "".join(_figure(*chart) for chart in _charts(summary)),
        "numbers": "".join(_row(*row) for row in [*table_rows(summary), *measured_rows(summary)]),
        "highest": "".join(_document(record) for record in summary["by_document"]["highest"]),
        "footer": f"Made by logitless {version_of('logitless')}. Point at a mark for its numbers.",
    }
    return document(title, (ASSETS / "eval.css").read_text(encoding="utf-8"), fill(ASSETS / "eval.html", parts))


def page_of_tasks(summary: dict[str, Any]) -> str:
    """The HTML of a summary of tasks."""
    tasks = (task.removesuffix(".yaml").rpartition("/")[2] for task in summary["options"]["tasks"])
    title = f"{summary['options']['model']}, evaluated on {', '.join(tasks)}"
    parts = {
        "title": html.escape(title),
        "rows": "".join(_task(*entry) for entry in summary["tasks"].items()),
        "charts": "".join(_figure(*chart) for chart in _charts_of_tasks(summary["tasks"])),
        "numbers": "".join(_row(*row) for row in rows_of_tasks(summary)),
        "footer": f"Made by logitless {version_of('logitless')} with lm-eval {summary['versions']['lm-eval']}. "
        "Point at a mark for its numbers.",
    }
    return document(title, (ASSETS / "eval.css").read_text(encoding="utf-8"), fill(ASSETS / "tasks.html", parts))


def _task(task: str, found: dict[str, Any]) -> str:
    """The rows of a task, one a metric; a share of its documents has a bar."""
    rows = ""
    for name, value, deviation in metrics_of(found):
        width = value if name.startswith(("acc", "exact")) else 0
        error = "" if deviation is None else f"± {deviation:.4f}"
        cells = (f"{found['documents']:,}", html.escape(name), metric_value(value), error)
        bar = f'<td><span class="share" style="width: {width:.1%}"></span></td>'
        rows += f"<tr><th>{html.escape(task)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}{bar}</tr>"
    return rows


def _charts_of_tasks(tasks: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Reliability and accuracy by entropy of each task whose answers are right or wrong."""
    for task, found in tasks.items():
        if certainty := found["certainty"]:
            charts = _reliability(certainty["bins"]), _correctness("entropy", certainty["entropy"])
            for title, svg, said in charts:
                yield f"{html.escape(task)}: {title.lower()} of {certainty['of']}", svg, said


def write_pages(config: EvalConfig, summary: dict[str, Any], text: str) -> None:
    """page.html and then summary.json, each whole or not at all."""
    for name, content in (("page.html", text), (SUMMARY, strict_json(summary, indent=2) + "\n")):
        remove_leftovers(config.folder / name)
        write_text(config.folder / name, content)


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, its number, what it means) of each headline."""
    bits, calibration = summary["bits_per_byte"], summary["calibration"]["expected_calibration_error"]
    tokens, documents = plural(summary["scored_tokens"], "token"), plural(scored_documents(summary), "document")
    tiles = [
        ("perplexity", format_perplexity(summary["perplexity"]), f"of {tokens} in {documents}"),
        ("bits per byte", "none" if bits is None else f"{bits:.3f}", "comparable across tokenizers"),
        ("accuracy", f"{summary['accuracy']:.1%}", "of tokens are the model's best entry"),
        ("calibration error", f"{calibration:.3f}", "between confidence and accuracy, on average"),
    ]
    if "compared" in summary:
        found = summary["compared"]
        ratio, theirs = ratio_value(found["perplexity_ratio"]), format_perplexity(found["perplexity"])
        tiles += [
            ("KL", f"{found['kl']:.4g}", "nats per token, from the model to the other"),
            ("same best entry", f"{found['agreement']:.2%}", "of tokens"),
            ("ratio of perplexities", ratio, f"the other has {theirs}"),
        ]
    return tiles


def _charts(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(title, SVG, what it says) of each chart."""
    found = [_reliability(summary["calibration"]["bins"])]
    for name, values in summary["against_correctness"].items():
        if values["groups"]:  # not where an entry that is never taken makes every self-certainty infinite
            found.append(_correctness(name.replace("_", "-"), values))
    return [*found, _documents(summary["by_document"]["nats_per_token"]), _contexts(summary["by_context"])]


def _reliability(bins: list[dict[str, Any]]) -> tuple[str, str, str]:
    what = "probability of the best entry" if "tokens" in bins[0] else "confidence in the answer"
    chart = Chart(Axis(what, 0, 1), Axis("share that is right", 0, 1))
    marks = [chart.bar(b["from"], b["to"], b["accuracy"], _of_bin(b)) for b in bins]
    marks.append(chart.line([(0, 0), (1, 1)], "diagonal"))
    marks += [chart.point(b["confidence"], b["accuracy"], _of_bin(b)) for b in bins]
    said = "On the diagonal the model is right as often as it says; below it, it is too sure of itself."
    return "Reliability", chart.svg(marks, "accuracy by confidence"), said


def _of_bin(b: dict[str, Any]) -> str:
    return f"{_count(b)}: confidence {b['confidence']:.3f}, accuracy {b['accuracy']:.3f}"


def _count(group: dict[str, Any]) -> str:
    """How many tokens, or documents, a mark stands for."""
    return plural(group["tokens"], "token") if "tokens" in group else plural(group["documents"], "document")


def _correctness(name: str, values: dict[str, Any]) -> tuple[str, str, str]:
    groups = values["groups"]
    points = [(g["mean"], g["accuracy"]) for g in groups]
    highest = ROOM * max(x for x, _ in points)
    chart = Chart(Axis(f"{name}, nats", 0, highest), Axis("accuracy", 0, 1))
    told = [f"{_count(g)}: mean {g['mean']:.3f}, accuracy {g['accuracy']:.3f}" for g in groups]
    marks = [chart.line(points), *(chart.point(*p, text) for p, text in zip(points, told, strict=True))]
    chance = values["auroc"]
    what = "token" if "tokens" in groups[0] else "document"
    said = (
        f"All {what}s are right, or all wrong."
        if chance is None
        else f"Of a right and a wrong {what} the right one has the higher number {chance:.1%} of the time."
    )
    return f"Accuracy by {name}", chart.svg(marks, f"accuracy by {name}"), said


def _documents(found: dict[str, Any]) -> tuple[str, str, str]:
    edges, counts = found["edges"], found["documents"]
    chart = Chart(Axis("nats per token", edges[0], edges[-1]), Axis("documents", 0, ROOM * max(counts), whole=True))
    spans = zip(edges, edges[1:], counts, strict=False)
    marks = [chart.bar(a, b, n, f"{a:.3f} to {b:.3f}: {plural(n, 'document')}") for a, b, n in spans if n]
    return "Documents", chart.svg(marks, "documents by nats per token"), "Perplexity is the exponential of it."


def _contexts(found: list[dict[str, Any]]) -> tuple[str, str, str]:
    names = [str(x["from"]) for x in found]
    points = [(float(i), x["nats_per_token"]) for i, x in enumerate(found)]
    highest = ROOM * max(y for _, y in points)
    chart = Chart(Axis("tokens before", -0.5, len(found) - 0.5, names), Axis("nats per token", 0, highest))
    told = [
        f"{x['from']} to {x['to']} before: {x['nats_per_token']:.3f} nats, {plural(x['tokens'], 'token')}"
        for x in found
    ]
    marks = [chart.line(points), *(chart.point(*p, text) for p, text in zip(points, told, strict=True))]
    said = "How much a longer context helps, in each doubling of it."
    return "By context", chart.svg(marks, "nats per token by context"), said


def _tile(what: str, number: str, meaning: str) -> str:
    what, number, meaning = map(html.escape, (what, number, meaning))
    return f'<div class="card"><p class="muted">{what}</p><p class="number">{number}</p><p>{meaning}</p></div>'


def _figure(title: str, svg: str, said: str) -> str:
    return f'<figure class="card"><h2>{title}</h2>{svg}<figcaption class="muted">{said}</figcaption></figure>'


def _row(name: str, value: str) -> str:
    return f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"


def _document(record: dict[str, Any]) -> str:
    values = (
        format_perplexity(record["perplexity"]),
        f"{record['scored_tokens']:,}",
        "" if record["bits_per_byte"] is None else f"{record['bits_per_byte']:.3f}",
        f"{record['accuracy']:.1%}",
    )
    cells = "".join(f"<td>{value}</td>" for value in values)
    return f"<tr><th>{html.escape(record['name'])}</th>{cells}</tr>"
