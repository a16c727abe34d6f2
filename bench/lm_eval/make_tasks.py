"""Makes the tasks' data from the standard library's docstrings: `python -m bench.lm_eval.make_tasks`.

The files are committed, since another Python has other docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODULES = """
argparse ast asyncio bisect calendar codecs collections copy csv dataclasses datetime difflib email enum
fnmatch fractions ftplib functools glob gzip heapq html http.client http.server imaplib inspect io json locale
logging mailbox math mimetypes operator os pathlib pickle platform pprint random re sched shelve shlex shutil
socket sqlite3 statistics string struct subprocess tarfile tempfile textwrap threading time tokenize traceback
types typing unittest urllib.parse urllib.request uuid warnings wave weakref xml.etree.ElementTree zipfile
"""
SHORTEST, LONGEST = 160, 2400  # characters of a docstring
EACH = 120  # documents of a task


def documented() -> Iterator[tuple[str, str]]:
    """(module.function, docstring) of public functions and classes, each docstring once."""
    seen: set[str] = set()
    for module in MODULES.split():
        for name, thing in sorted(vars(importlib.import_module(module)).items()):
            owner = getattr(thing, "__module__", None)
            if name.startswith("_") or not callable(thing) or owner is None:
                continue
            text = inspect.getdoc(thing) or ""
            if SHORTEST <= len(text) <= LONGEST and text.isascii() and text not in seen:
                seen.add(text)
                yield f"{module}.{name}", text


def cloze(name: str, text: str) -> dict[str, Any] | None:
    """A docstring without its last word."""
    words = text.rstrip(" .\n").rsplit(" ", 1)
    if len(words) < 2 or not words[1].isalpha() or len(words[1]) < 3:
        return None
    return {"name": name, "text": words[0], "word": words[1]}


def choice(name: str, text: str, others: list[str], draw: random.Random) -> dict[str, Any]:
    """A docstring without its function's name, which is one of four of other modules and this one."""
    own = name.rsplit(".", 1)[1]
    names = [own, *draw.sample(sorted({o.rsplit(".", 1)[1] for o in others} - {own}), 3)]
    draw.shuffle(names)
    return {"text": text.replace(own, "___"), "choices": names, "label": names.index(own)}


def main() -> None:
    found = list(documented())
    draw = random.Random(0)
    draw.shuffle(found)
    clozes = [row for row in (cloze(*pair) for pair in found) if row is not None][:EACH]
    names = [name for name, _ in found]
    choices = [choice(name, text, names, draw) for name, text in found[-EACH:]]
    texts = [{"text": text} for _, text in found[:EACH]]
    for task, rows in {"cloze": clozes, "choice": choices, "text": texts}.items():
        (HERE / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
