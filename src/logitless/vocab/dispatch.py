"""Which backend serves a call. `None` picks one; a named backend works or raises with its reason."""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType

from ..errors import BackendError

BACKENDS = {"eager": "logitless.vocab.backends.eager"}


def choose(name: str | None, device: str) -> str:
    """The backend's name for tensors on `device`."""
    if name is None:
        return "eager"
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BackendError(f"backend: expected one of {', '.join(BACKENDS)} or None, got {name!r}{hint}")
    return name


def load(name: str) -> ModuleType:
    """The backend's module, imported on first use."""
    return importlib.import_module(BACKENDS[name])
