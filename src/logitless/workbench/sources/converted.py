"""Models that come as GGUF, in packages or files: converted once, kept in the user's cache, whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ...errors import ConfigError
from ...models.gguf.convert import convert
from ...models.gguf.header import file_of, read_header
from ...models.pretrained import PACKAGES, check_installed, file_of_package, sha256_of
from ..common.files import MOST_OF_NAME, remove_leftovers, write_whole
from ..common.lock import acquire, holder, release

FORM = 4  # of what is kept; another one is made anew, as what transformers 5.6 converted with another end of text
HASH_DIGITS = 16
POLL = 0.5  # seconds


def is_packed(name: str) -> bool:
    """Whether a --model is the name of a packaged model, or leads to a GGUF file. Raises ConfigError as `file_of`."""
    return name in PACKAGES or file_of(name) is not None


def check_packed(name: str) -> None:
    """ConfigError where such a model's package is missing, or its file is none or damaged; nothing is converted."""
    if (file := file_of(name)) is not None and name not in PACKAGES:
        read_header(file)
    elif not _place(name, PACKAGES[name].sha256).exists():
        check_installed(name)


def directory_of(name: str) -> Path:
    """The transformers directory of such a model, its weights in float32; converted where nobody did yet.

    The directory is named after the hash of the GGUF file's content. Raises ConfigError.
    """
    check_packed(name)
    file = None if name in PACKAGES else file_of(name)
    place = _place(name, PACKAGES[name].sha256 if file is None else sha256_of(file))
    if not place.exists():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _locked(place.parent, name), file_of_package(name) if file is None else nullcontext(file) as whole:
                if not place.exists():  # another process may have been faster
                    _convert(whole, place, name)
        except OSError as error:
            raise ConfigError(
                f"--model {name}: cannot keep the converted model at {place}: {error.strerror or error}; free some "
                "space, or name another folder in XDG_CACHE_HOME"
            ) from None
    return place


def _place(name: str, content: str) -> Path:
    """Where a model is kept: named after what `name_of` calls it and its content."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = f"{packed_name(name)[:MOST_OF_NAME]}-{content[:HASH_DIGITS]}-{FORM}"
    return cache / "logitless" / "models" / folder / "model"


def packed_name(name: str) -> str:
    """What such a model is called: its package's name, or its file's without the ending."""
    file = None if name in PACKAGES else file_of(name)
    return name if file is None else file.stem


@contextmanager
def _locked(place: Path, name: str) -> Iterator[None]:
    """One process at a time; others wait for it."""
    waiting = False
    while not acquire(place):
        if not waiting:
            _say(f"waiting for {holder(place)}, which converts {name} ...")
            waiting = True
        time.sleep(POLL)
    try:
        yield
    finally:
        release(place)


def _convert(file: Path, place: Path, name: str) -> None:
    from safetensors import SafetensorError

    from ..common.say import quiet

    _say(f"converting {name} to {place}, once: about a minute ...")
    quiet()
    remove_leftovers(place)
    try:
        write_whole(place, lambda folder: convert(file, folder))
    except SafetensorError as error:  # how safetensors says that a disk is full
        raise OSError(str(error)) from None


def _say(text: str) -> None:
    from rich.console import Console

    from ..common.say import say

    say(Console(stderr=True), text)
