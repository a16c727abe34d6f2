"""Which backend serves a call. `None` picks one; a named backend works or raises with its reason."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...algebra.stats import looks_twice, sums_of
from ...errors import BackendError
from . import compiled_support, quack_support, triton_support

WORTH_COMPILING = 1 << 32  # logits of a call, from which on ten such calls pay for what is loaded to compile them
WORTH_REGISTERS = 1 << 22  # of a library that takes a second, once a machine and not a process: see `by_registers`
SAVED_WITH_MORE = 16  # times as much of a logit's time as of a log-prob's, with entropy or beside a reference
SAVED_AT_SECOND_LOOK = 256


@dataclass(frozen=True)
class Candidate:
    """A backend that may serve a call; `backends.load` has the backend itself.

    why_not: the reason why it cannot run on a device, None where it can, said without loading it. devices: the types on
    which it is taken where no backend is named, None for all. least: logits for that of a call for log-probs. only: the
    one function that it computes, whole and by itself; None where it serves every pass by the contract of
    `backends.base`.
    """

    why_not: Callable[[torch.device | str], str | None]
    devices: tuple[str, ...] | None = None
    least: int = 0
    only: str | None = None

    def serves(self, device: torch.device | str) -> bool:
        """Whether it is taken on such a device where no backend is named."""
        return self.devices is None or torch.device(device).type in self.devices

    def least_for(self, want: tuple[str, ...]) -> int:
        """The logits from which on it is taken for these statistics: the fewer, the more is done with each."""
        sums = sums_of(want)
        if looks_twice(sums):
            return self.least // SAVED_AT_SECOND_LOOK
        return self.least // SAVED_WITH_MORE if sums & {"t", "ref"} else self.least

    def fits(self, device: torch.device | str, logits: int, want: tuple[str, ...]) -> bool:
        """Whether it is taken for so many logits, too."""
        return self.serves(device) and logits >= self.least_for(want)


# In the order of preference.
CANDIDATES = {
    "triton": Candidate(triton_support.why_not, ("cuda",)),
    "compiled": Candidate(compiled_support.why_not, ("cpu",), WORTH_COMPILING),
    "eager": Candidate(lambda device: None),
    quack_support.NAME: Candidate(quack_support.why_not, (), only=quack_support.FUNCTION),
}


def choose(name: str | None, device: torch.device | str, logits: int = 0, want: tuple[str, ...] = ()) -> str:
    """The backend's name for these statistics of so many logits on `device`, 0 where nothing is to be compiled."""
    if name is None:
        return next(x for x, c in CANDIDATES.items() if c.fits(device, logits, want) and c.why_not(device) is None)
    if not isinstance(name, str) or name not in CANDIDATES:
        near = difflib.get_close_matches(str(name), CANDIDATES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BackendError(f"backend: expected one of {', '.join(sorted(CANDIDATES))} or None, got {name!r}{hint}")
    only = CANDIDATES[name].only
    if only is not None:
        raise BackendError(f"backend {name!r}: expected {only}, which is all that it computes; leave backend out")
    require(name, device)
    return name


def require(name: str, device: torch.device | str) -> None:
    """Raise BackendError where this backend cannot run on a device."""
    reason = CANDIDATES[name].why_not(device)
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot run here: {reason}; backend=None takes one that can")


def passed_over(
    name: str, device: torch.device | str, logits: int, want: tuple[str, ...] = (), named: bool = False
) -> str:
    """Why a call gets this backend and not one that is preferred where it runs; empty where none is.

    named: whether the caller asked for it.
    """
    reasons, alone = [], "named" if named else f"{name} alone serves the call"
    for better, candidate in CANDIDATES.items():
        if better == name:
            break
        if candidate.serves(device):
            least = candidate.least_for(want)
            few = f"fewer than {least:,} logits"
            reasons.append(f"not {better}: {few if logits < least else candidate.why_not(device) or alone}")
    return ", ".join(reasons)
