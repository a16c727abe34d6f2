"""What a command reads, looked at before anything is imported that takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

from ..errors import ConfigError, DataError, OptionError
from ..printable import is_utf8
from ..workbench.common.options import DEFAULT_MODEL, SMALL_MODEL
from ..workbench.sources.corpus import check_one_text
from ..workbench.sources.model import check_classifier, check_model, said_of

MOST_OF_PROMPT = 100 * 10**6  # bytes: more than any model reads


def check_inputs(
    model: str,
    wish: str | None = None,
    data: str | None = None,
    teacher: str | None = None,
    others: Mapping[str, str | None] = MappingProxyType({}),
) -> None:
    """DataError, ConfigError for a path that is not there or no data; `wish`: what the model's weights are for.

    The default models are trained where they are not there. others: further models with weights, by their options.
    """
    for option, name in {"model": model, "teacher": teacher, **others}.items():
        if name is not None and not is_utf8(name):
            raise ConfigError(f"--{option} {name}: expected a name in UTF-8, by which models can be read: rename it")
    for option, path in (("data", data), ("teacher", teacher)):
        if path is not None and not Path(path).exists():
            raise DataError(f"--{option} {path}: no such file or directory")
    if data is not None:
        check_one_text(Path(data))
    if model not in (DEFAULT_MODEL, SMALL_MODEL) or Path(model).exists():
        check_model(model, wish)
    for option, other in others.items():
        if other is not None:
            with said_of(option):
                check_model(other, "compare with") if option == "against" else check_classifier(other)


def still_read(data: str | None, resume: Path | None, *prepared: str) -> str | None:
    """--data, or None where a run that goes on has all of this, which it prepared of it."""
    return None if resume is not None and all((resume / name).exists() for name in prepared) else data


def read_prompts(given: Sequence[str], files: Sequence[Path]) -> list[str]:
    """The prompts in order; standard input where none are given. OptionError, DataError for an empty one or no text."""
    if not given and not files:
        piped = sys.stdin is not None and not sys.stdin.isatty()
        text = _read(Path("-"), "standard input") if piped else ""
        if not text:
            raise OptionError("no prompt: expected --prompt TEXT, --prompt-file FILE, or text on standard input")
        return [text]
    named = [(f"--prompt {i}", text) for i, text in enumerate(given, 1)]
    named += [(f"--prompt-file {path}", _read(path, f"--prompt-file {path}")) for path in files]
    for name, text in named:
        if not text:
            raise OptionError(f"{name}: expected some text to go on from, got none")
        if not is_utf8(text):
            raise DataError(f"{name}: not UTF-8 text")
    return [text for _, text in named]


def _read(path: Path, name: str) -> str:
    """A file's text without the line break at its end."""
    stdin = str(path) == "-"
    try:
        with nullcontext(sys.stdin.buffer) if stdin else path.open("rb") as file:
            data = file.read(MOST_OF_PROMPT + 1)
    except OSError as error:
        raise DataError(f"{name}: expected a file of text to read ({error.strerror})") from None
    if len(data) > MOST_OF_PROMPT:
        raise DataError(f"{name}: expected at most {MOST_OF_PROMPT // 10**6} MB of text, got more, or what never ends")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text (byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")
