"""What the docs build checks and adds: every public name is on the API page, code fits its column, lists, weights."""

import re
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

import logitless
from logitless import errors

# Of code at 1,280 px, and on a page that hides its table of contents.
COLUMNS, WHOLE_COLUMNS = 100, 120
# What a search weighs a page by: people come for what to do, not for why it was decided so.
BOOSTS = {"index.md": 4.0, "how-to/transformers.md": 4.0}  # where most begin
BOOSTS |= {"how-to/": 2.0, "tutorials/": 2.0, "quickstart.md": 2.0, "recipes.md": 2.0}
BOOSTS |= {"decisions/": 1e-4, "changelog.md": 1e-4, "where-reports-go-wrong.md": 0.1}
CODE, TAG = re.compile(r"<pre>.*?</pre>", re.DOTALL), re.compile(r"<[^>]+>")
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
MODULES = (
    "losses",
    "relax",
    "retrieval",
    "sample",
    "memory",
    "multi_token",
    "jax",
    "integrations.trl",
)  # whose names are public


def public_names() -> dict[str, str]:
    """What the API page must hold: each name, and where it is defined."""
    modules = [logitless, *(import_module(f"logitless.{name}") for name in MODULES)]
    found = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        for name in module.__all__
    }
    found |= {
        f"logitless.errors.{name}": x for name, x in vars(errors).items() if isinstance(x, type)
    }
    return {
        name: f"{x.__module__}.{x.__qualname__}" if callable(x) else name
        for name, x in found.items()
    }


def undocumented(html: str) -> list[str]:
    """The public names without an entry on a rendered page: none has the name, its place or its other name as id."""
    ids, names = set(re.findall(r'id="(logitless[\w.]*)"', html)), public_names()
    there = {place for name, place in names.items() if {name, place} & ids}
    return [name for name, place in names.items() if place not in there]


def twice(html: str) -> list[str]:
    """The public names with two entries on a rendered page."""
    ids = re.findall(r'id="(logitless[\w.]*)"', html)
    return sorted({name for name in ids if ids.count(name) > 1})


def code_as_prose(html: str) -> list[str]:
    """The paragraphs of a page with lines that are assignments or indented: code, run together."""
    texts = (unescape(TAG.sub("", found)) for found in PARAGRAPH.findall(html))
    return [text for text in texts if re.search(r"^\w+ = |^ {2}", text, re.MULTILINE)]


def decisions(folder: Path) -> str:
    """A Markdown list of the decision records, by number."""
    pages = sorted(folder.glob("[0-9]*.md"))
    if not pages:
        return "None is recorded yet."
    titles = {
        page: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages
    }
    return "\n".join(f"- [{title}]({page.name})" for page, title in titles.items())


def too_wide(html: str, columns: int) -> list[str]:
    """The lines of a rendered page's code blocks that are longer than `columns`."""
    lines = (
        line for block in CODE.findall(html) for line in unescape(TAG.sub("", block)).splitlines()
    )
    return [line for line in lines if len(line) > columns]


def check_columns(html: str, meta: dict[str, Any], page: str) -> None:
    """PluginError for a rendered page, of this metadata and name, with code that does not fit."""
    columns = WHOLE_COLUMNS if "toc" in meta.get("hide", ()) else COLUMNS
    if wide := too_wide(html, columns):
        raise PluginError(
            f"{page}: {columns} columns of code fit, {len(wide)} lines have more: {wide[0]}"
        )


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    for place, boost in BOOSTS.items():
        if page.file.src_uri.startswith(place):
            page.meta.setdefault("search", {"boost": boost})
    if page.file.src_uri == "decisions/index.md":
        return markdown + "\n" + decisions(Path(config.docs_dir) / "decisions")
    return markdown


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    check_columns(html, page.meta, page.file.src_uri)
    if page.file.src_uri == "api.md" and (missing := undocumented(html)):
        raise PluginError(f"public names without documentation on api.md: {', '.join(missing)}")
    if page.file.src_uri == "api.md" and (wrong := [*twice(html), *code_as_prose(html)]):
        raise PluginError(f"api.md: there twice, or code that is no block of its own: {wrong[0]}")
    return html
