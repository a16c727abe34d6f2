"""What a step asks of the device, in order: products, kernels of Triton, other operators, and waits of the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.counts.kernels import Launch


@dataclass(frozen=True)
class Product:
    """A matrix product (rows, depth) x (depth, columns); its operands and its result take so many bytes a number."""

    rows: int
    columns: int
    depth: int
    operand: int
    result: int
    adds: bool = False  # onto what is there, so that the result is read as well
    tf32: bool = False  # of fp32 operands, ten binary digits of each

    @property
    def flop(self) -> int:
        return 2 * self.rows * self.columns * self.depth

    @property
    def nbytes(self) -> int:
        read = (self.rows + self.columns) * self.depth * self.operand
        return read + self.rows * self.columns * self.result * (1 + self.adds)

    def __str__(self) -> str:
        return f"{self.rows:,} x {self.columns:,} x {self.depth:,}"


@dataclass(frozen=True)
class Operator:
    """Another operator of torch that computes something, with the bytes that it reads and writes."""

    name: str
    nbytes: int
    converts: bool = False  # nothing else: a copy in another dtype


@dataclass(frozen=True)
class Wait:
    """The host asks for a number, and waits for all that was launched before."""

    what: str


Event = Product | Operator | Wait | Launch


@dataclass
class Recording:
    """The events of a step. capturing: a CUDA graph is being captured; ignored: so many tokens have no label.

    known: what the host hears where it asks, by what a wait says; elsewhere every number is 1.
    """

    events: list[Event] = field(default_factory=list)
    capturing: bool = False
    ignored: int = 0
    known: dict[str, Any] = field(default_factory=dict)
    quiet: int = 0  # while it is not 0 nothing is recorded: what stands for one product is several operators

    def add(self, event: Event) -> None:
        if not self.quiet:
            self.events.append(event)

    def of(self, kind: type[Any]) -> Iterator[Any]:
        return (event for event in self.events if isinstance(event, kind))

    @property
    def launches(self) -> int:
        """Whatever the device has to be told, waits aside."""
        return sum(not isinstance(event, Wait) for event in self.events)

    @property
    def waits_before_products(self) -> int:
        """How often the host waits with no product launched yet."""
        kinds = [type(event) for event in self.events]
        first = kinds.index(Product) if Product in kinds else len(kinds)
        return kinds[:first].count(Wait)
