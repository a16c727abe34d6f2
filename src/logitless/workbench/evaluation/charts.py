"""Charts as SVG inside a page, in its colours: axes, bars, lines and points, each with its numbers on hover."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 48
TICKS = 5


@dataclass(frozen=True)
class Axis:
    """A range of numbers, `whole` ones or any, and what they are; `names` stand in the places of 0, 1, 2, ..."""

    label: str
    low: float
    high: float
    names: Sequence[str] = ()
    whole: bool = False

    def share(self, x: float) -> float:
        return (x - self.low) / ((self.high - self.low) or 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        if self.names:
            step = -(-len(self.names) // 8)
            return [(float(i), name) for i, name in enumerate(self.names) if i % step == 0]
        values = MaxNLocator(TICKS, integer=self.whole).tick_values(self.low, self.high)
        return [(x, f"{x:.10g}") for x in map(float, values) if self.low <= x <= self.high]


@dataclass(frozen=True)
class Chart:
    """Where the numbers of two axes lie; its methods draw what `svg` puts together."""

    x: Axis
    y: Axis

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, up = self.x.share(x), self.y.share(y)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def bar(self, start: float, end: float, height: float, told: str) -> str:
        (left, top), (right, bottom) = self.at(start, height), self.at(end, self.y.low)
        size = f'width="{max(1.0, right - left - 1):.1f}" height="{max(0.0, bottom - top):.1f}"'
        return f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" {size}>{_told(told)}</rect>'

    def line(self, points: Sequence[tuple[float, float]], kind: str = "line") -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        return f'<polyline class="{kind}" points="{path}"/>'

    def point(self, x: float, y: float, told: str) -> str:
        across, up = self.at(x, y)
        return f'<circle class="point" cx="{across:.1f}" cy="{up:.1f}" r="4">{_told(told)}</circle>'

    def svg(self, marks: Sequence[str], told: str) -> str:
        """The chart; `told` says in words what it shows."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(told)}">'
            f"{self._grid()}{''.join(marks)}</svg>"
        )

    def _grid(self) -> str:
        left, bottom = self.at(self.x.low, self.y.low)
        right, top = self.at(self.x.high, self.y.high)
        parts = [f'<line class="axis" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>']
        for value, name in self.x.ticks():
            x, _ = self.at(value, self.y.low)
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{html.escape(name)}</text>')
        for value, name in self.y.ticks():
            _, y = self.at(self.x.low, value)
            parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(name)}</text>')
        x, y = (left + right) / 2, (top + bottom) / 2
        parts.append(f'<text class="label" x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{self.x.label}</text>')
        turned = f'x="14" y="{y}" transform="rotate(-90 14 {y})"'
        parts.append(f'<text class="label" {turned} text-anchor="middle">{self.y.label}</text>')
        return "".join(parts)


def _told(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"
