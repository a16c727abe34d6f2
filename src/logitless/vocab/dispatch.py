"""Which backend serves a call. `None` picks one; a named backend works or raises with its reason."""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType

from ..errors import BackendError
from .backends import triton_support

BACKENDS = {"eager": "logitless.vocab.backends.eager", "triton": "logitless.vocab.backends.triton"}
ROWS = {"eager": "logitless.vocab.rows", "triton": "logitless.vocab.backends.triton_rows"}


def choose(name: str | None, device: str) -> str:
    """The backend's name for tensors on `device`."""
    if name is None:
        return "triton" if device == "cuda" and why_not("triton", device) is None else "eager"
    if name not in BACKENDS:
        near = difflib.get_close_matches(str(name), BACKENDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BackendError(f"backend: expected one of {', '.join(BACKENDS)} or None, got {name!r}{hint}")
    reason = why_not(name, device)
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot run here: {reason}; backend=None takes one that can")
    return name


def why_not(name: str, device: str) -> str | None:
    """The reason why a backend cannot run on this type of device, None where it can."""
    return triton_support.why_not(device) if name == "triton" else None


def load(name: str) -> ModuleType:
    """The backend's module, imported on first use."""
    return importlib.import_module(BACKENDS[name])


def rows_of(name: str) -> ModuleType:
    """The backend's products with a few rows of a table: `vocab.rows`, or what stands for it."""
    return importlib.import_module(ROWS[name])
