"""A finished trace: stages, the peak and what was alive at it, bytes by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...resident import thin
from .lint import Finding
from .storages import Allocation

LARGEST = 10
POINTS, FEW = 1000, 50  # of a timeline in JSON, about, and of each of its stages at least
CLOSE = 0.999  # of the peak: what was asked for from here on made it
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "activation gradients",
    "logits",
    "loss workspace",
    "optimizer workspace",
    "inputs",
)


@dataclass(frozen=True)
class Stage:
    """A part of the step: the bytes alive at its end, its peak, and the events it spans."""

    name: str
    nbytes: int
    peak: int
    start: int
    end: int


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at once: during which stage, and the operator and module that made it so."""

    nbytes: int
    stage: str
    op: str
    module: str
    event: int


@dataclass(frozen=True)
class Recording:
    """Allocations, the bytes alive after each event, and the event at which each stage ended.

    `host`: the most bytes that lay on the host at once, for a GPU's step.
    """

    allocations: list[Allocation]
    curve: list[int]
    marks: list[tuple[str, int]]
    findings: tuple[Finding, ...] = ()
    host: int = 0

    @cached_property
    def stages(self) -> list[Stage]:
        found = []
        for (_, start), (name, end) in pairwise([("", 0), *self.marks]):
            found.append(Stage(name, self.curve[end], max(self.curve[start : end + 1]), start, end))
        return found

    @cached_property
    def peak(self) -> Peak:
        most = max(self.curve)
        event = start = self.curve.index(most)
        while start and self.curve[start - 1] >= CLOSE * most:  # a scalar on top of a large tensor sets no peak
            start -= 1
        asked = [a for a in self.allocations if start <= a.born <= event]
        top = max(asked, key=lambda a: a.nbytes) if asked else None
        stage = next((s.name for s in self.stages if event <= s.end), "")
        return Peak(most, stage, top.op if top else "", top.module if top else "", event)

    def alive(self, event: int) -> list[Allocation]:
        """What was alive after an event, the largest first."""
        return sorted((a for a in self.allocations if a.alive(event)), key=lambda a: -a.nbytes)

    def categories(self, event: int) -> dict[str, int]:
        """Bytes by category after an event."""
        total: Counter[str] = Counter()
        for a in self.alive(event):
            total[a.category] += a.nbytes
        return {name: total[name] for name in CATEGORIES if total[name]}

    def _timeline(self) -> Iterator[tuple[float, int]]:
        """(event, bytes): all of a stage of few events; of a longer one the highest of each stretch."""
        points = list(enumerate(self.curve))
        for start, end in pairwise([0, *(end + 1 for _, end in self.marks), len(points)]):
            yield from thin(points[start:end], max(FEW, POINTS * (end - start) // len(points)))

    def as_json(self) -> dict[str, Any]:
        """The recording for machines: sizes in bytes, places in events."""
        peak = self.peak
        return {
            "stages": [
                {"name": s.name, "bytes": s.nbytes, "peak_bytes": s.peak, "start": s.start, "end": s.end}
                for s in self.stages
            ],
            "peak": {
                "bytes": peak.nbytes,
                "stage": peak.stage,
                "op": peak.op,
                "module": peak.module,
                "event": peak.event,
                "categories": self.categories(peak.event),
                "tensors": [tensor_json(a) for a in self.alive(peak.event)[:LARGEST]],
            },
            "timeline": [list(point) for point in self._timeline()],
            "host_peak_bytes": self.host,
            "lint": [finding.as_json() for finding in self.findings],
        }


def tensor_json(a: Allocation) -> dict[str, Any]:
    """One tensor that was alive."""
    return {
        "bytes": a.nbytes,
        "shape": list(a.shape),
        "dtype": a.dtype,
        "op": a.op,
        "module": a.module,
        "category": a.category,
    }
