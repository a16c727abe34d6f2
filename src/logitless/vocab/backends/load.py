"""The backends by name: whether each can run here, said without loading it, and the backend itself, on first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from .base import Backend
from .triton import support as triton_support


@dataclass(frozen=True)
class Entry:
    """A backend that may be there.

    load: imports it, and its compiler. why_not: the reason why it cannot run on a type of device, None where it can.
    devices: the types on which it is taken where no backend is named, None for all.
    """

    load: Callable[[], Backend]
    why_not: Callable[[str], str | None]
    devices: tuple[str, ...] | None = None

    def preferred_on(self, device: str) -> bool:
        """Whether it is taken on this type of device where no backend is named."""
        return self.devices is None or device in self.devices


def _eager() -> Backend:
    from .eager.backend import EagerBackend

    return EagerBackend()


def _triton() -> Backend:
    from .triton.backend import TritonBackend

    return TritonBackend()


# In the order of preference.
BACKENDS = {
    "triton": Entry(_triton, triton_support.why_not, ("cuda",)),
    "eager": Entry(_eager, lambda device: None),
}


@cache
def load(name: str) -> Backend:
    """The backend of this name."""
    return BACKENDS[name].load()
