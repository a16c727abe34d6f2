"""Text of others, such as a file's name or a model's, that is safe to print: shown, never obeyed."""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_NAMED = 4  # of a list of names
# Control characters, and those that turn the direction of all that follows.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """Text that is safe to print among other text; line breaks and tabs stay."""
    return UNSAFE.sub(_escaped, text)


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can write it: not where a name of other bytes, or an escape, left half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def on_one_line(text: str) -> str:
    """The same without line breaks."""
    return shown(text.replace("\n", "\\n"))


def few(names: Sequence[str]) -> str:
    """The first names, and how many there are besides."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
