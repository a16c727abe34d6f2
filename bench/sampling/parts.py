"""What the parts of the sampling benchmark are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

Record = dict[str, Any]


class Way(Protocol):
    """One way to do a part's work, built in its own process: its inputs are made here and not counted."""

    def error(self) -> float:
        """How far its values are off, in the part's own unit; 0 for a floor."""
        ...

    def run(self) -> Any:
        """The work."""
        ...


@dataclass(frozen=True)
class Part:
    """One kind of work: how to do it, and what the first way, ours, should reach against others."""

    title: str
    ways: dict[str, Callable[[str], Way]]  # by name; takes the size; ours first
    sizes: dict[str, str]  # what each size means, for people
    unit: str  # of `error`
    error_limit: float
    limits: dict[str, float] = field(default_factory=dict)  # way -> our time may be so many times that way's
    memory_limit_mb: float | None = None
