"""Checks and lists of the docs build: every public name is on the API page; decisions are listed by their files."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

import logitless


def public_names() -> list[str]:
    """What the API page must hold."""
    return [f"logitless.{name}" for name in logitless.__all__] + [
        f"logitless.losses.{name}" for name in logitless.losses.__all__
    ]


def undocumented(html: str) -> list[str]:
    """The public names without an entry on a rendered page. An entry has the name, or the name's own place, as id."""
    ids = set(re.findall(r'id="(logitless[\w.]*)"', html))
    return [name for name in public_names() if name not in ids]


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
