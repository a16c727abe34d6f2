"""Which backend serves a call. `None` picks one; a named backend works or raises with its reason."""

from __future__ import annotations

import difflib

from ...errors import BackendError
from ..backends.load import BACKENDS
from ..backends.triton import support


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
    return support.why_not(device) if name == "triton" else None
