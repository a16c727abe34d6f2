"""A backend by its name, imported on first use: a compiler is then needed for the first time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from .base import Backend


def _eager() -> Backend:
    from .eager.backend import EagerBackend

    return EagerBackend()


def _triton() -> Backend:
    from .triton.backend import TritonBackend

    return TritonBackend()


def _compiled() -> Backend:
    from .compiled.backend import CompiledBackend

    return CompiledBackend()


LOADERS: dict[str, Callable[[], Backend]] = {"compiled": _compiled, "eager": _eager, "triton": _triton}


@cache
def load(name: str) -> Backend:
    """The backend of this name, one of `call.choice.CANDIDATES` that serve every pass."""
    return LOADERS[name]()
