"""HTML pages that need nothing else: a template filled with its parts, and values that stay values inside a script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def fill(template: Path, parts: dict[str, str]) -> str:
    """The template with each {{name}} replaced by that part; parts are not looked into again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template.read_text(encoding="utf-8"))


def script_value(value: Any) -> str:
    """A value as JavaScript, without a "</script>" inside the page."""
    return json.dumps(value).replace("<", "\\u003c")
