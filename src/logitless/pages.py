"""HTML pages that need nothing else: a template filled with its parts, and values that stay values inside a script."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).with_name("assets")


def document(title: str, style: str, body: str) -> str:
    """A whole page: its title as text, its style behind the colours and type that all pages share, its body as HTML."""
    base = (ASSETS / "base.css").read_text(encoding="utf-8")
    return fill(ASSETS / "document.html", {"title": html.escape(title), "style": base + style, "body": body})


def fill(template: Path, parts: dict[str, str]) -> str:
    """The template with each {{name}} replaced by that part; parts are not looked into again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template.read_text(encoding="utf-8"))


def script_value(value: Any) -> str:
    """A value as JavaScript, without a "</script>" inside the page."""
    return json.dumps(value).replace("<", "\\u003c")
