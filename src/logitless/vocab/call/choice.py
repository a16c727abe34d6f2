"""Which backend serves a call. `None` picks one; a named backend works or raises with its reason."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import BackendError
from . import triton_support


@dataclass(frozen=True)
class Candidate:
    """A backend that may serve a call; `backends.load` has the backend itself.

    why_not: the reason why it cannot run on a type of device, None where it can, said without loading it. devices: the
    types on which it is taken where no backend is named, None for all.
    """

    why_not: Callable[[str], str | None]
    devices: tuple[str, ...] | None = None


# In the order of preference.
CANDIDATES = {
    "triton": Candidate(triton_support.why_not, ("cuda",)),
    "eager": Candidate(lambda device: None),
}


def choose(name: str | None, device: str) -> str:
    """The backend's name for tensors on `device`."""
    if name is None:
        fitting = (each for each, x in CANDIDATES.items() if x.devices is None or device in x.devices)
        return next(each for each in fitting if CANDIDATES[each].why_not(device) is None)
    if name not in CANDIDATES:
        near = difflib.get_close_matches(str(name), CANDIDATES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BackendError(f"backend: expected one of {', '.join(sorted(CANDIDATES))} or None, got {name!r}{hint}")
    reason = CANDIDATES[name].why_not(device)
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot run here: {reason}; backend=None takes one that can")
    return name
