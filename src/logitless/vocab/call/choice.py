"""Which backend serves a call. `None` picks one; a named backend works or raises with its reason."""

from __future__ import annotations

import difflib

from ...errors import BackendError
from ..backends.load import BACKENDS


def choose(name: str | None, device: str) -> str:
    """The backend's name for tensors on `device`."""
    if name is None:
        return next(each for each, x in BACKENDS.items() if x.preferred_on(device) and x.why_not(device) is None)
    if name not in BACKENDS:
        near = difflib.get_close_matches(str(name), BACKENDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BackendError(f"backend: expected one of {', '.join(sorted(BACKENDS))} or None, got {name!r}{hint}")
    reason = BACKENDS[name].why_not(device)
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot run here: {reason}; backend=None takes one that can")
    return name
