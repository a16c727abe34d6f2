"""Checks and lists of the docs build: every public name is on the API page; decisions are listed by their files."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

import logitless
from logitless import errors

MODULES = ("losses", "relax", "sample", "memory", "jax", "integrations.trl")  # whose names are public


def public_names() -> dict[str, str]:
    """What the API page must hold: each name, and where it is defined."""
    modules = [logitless, *(import_module(f"logitless.{name}") for name in MODULES)]
    found = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    found |= {f"logitless.errors.{name}": x for name, x in vars(errors).items() if isinstance(x, type)}
    return {name: f"{x.__module__}.{x.__qualname__}" if callable(x) else name for name, x in found.items()}


def undocumented(html: str) -> list[str]:
    """The public names without an entry on a rendered page: none has the name, its place or its other name as id."""
    ids, names = set(re.findall(r'id="(logitless[\w.]*)"', html)), public_names()
    there = {place for name, place in names.items() if {name, place} & ids}
    return [name for name, place in names.items() if place not in there]


def decisions(folder: Path) -> str:
    """A Markdown list of the decision records, by number."""
    pages = sorted(folder.glob("[0-9]*.md"))
    if not pages:
        return "None is recorded yet."
    titles = {page: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages}
    return "\n".join(f"- [{title}]({page.name})" for page, title in titles.items())


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    if page.file.src_uri == "decisions/index.md":
        return markdown + "\n" + decisions(Path(config.docs_dir) / "decisions")
    return markdown


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri == "api.md" and (missing := undocumented(html)):
        raise PluginError(f"public names without documentation on api.md: {', '.join(missing)}")
    return html
