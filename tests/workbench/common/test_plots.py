"""What loss.png and memory.png draw, from a run's records."""

import math
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from logitless.workbench.common import plots
from logitless.workbench.common.plots import plot_loss, plot_memory


@pytest.fixture
def drawn(monkeypatch) -> list[Axes]:
    """The axes of each figure, in the place of its file."""
    seen: list[Axes] = []
    monkeypatch.setattr(plots, "finish", lambda figure, panels, path: seen.extend(panels))
    return seen


def points(line) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


def test_the_loss_of_each_step_its_mean_and_the_held_out_ones(drawn):
    records = [{"step": step, "loss": float(step)} for step in range(1, 8)]
    records += [{"step": 0, "held_out_loss": 9.0}, {"step": 7, "held_out_loss": 3.25}, {"step": 7, "seconds": 2.0}]
    plot_loss(Path("loss.png"), records, 100)
    (axes,) = drawn
    guess, each, mean, held = axes.lines
    assert {y for _, y in points(guess)} == {math.log(100)}
    assert points(each) == [(step, step) for step in range(1, 8)]
    assert points(mean) == [(1, 1), (2, 1.5), (3, 2), (4, 2.5), (5, 3), (6, 4), (7, 5)]  # of the last five steps
    assert points(held) == [(0, 9), (7, 3.25)]
    assert [text.get_text() for text in axes.texts] == ["uniform guess, log 100", "9.00", "3.25"]


def test_memory_of_what_was_measured(drawn):
    """What a step gave back of the memory before it is no memory of the step's own."""
    dense = {"curve": [(0.0, -(1 << 20)), (1.5, 6 << 20)], "peak_bytes": 7 << 20}
    assert plot_memory(Path("memory.png"), {"dense": dense, "logitless": {}}, 1024, 50_000)
    (axes,) = drawn
    (line,) = axes.lines
    assert points(line) == [(0, 0), (1.5, 6)]
    assert line.get_label() == "dense: +7 MiB at the peak"
    assert axes.get_xlim()[0] == 0
    assert axes.get_ylim() == (0, pytest.approx(1.3 * 6))
    assert "1,024 tokens × 50,000 entries" in axes.get_title()


def test_nothing_is_drawn_where_nothing_was_measured(drawn):
    assert not plot_memory(Path("memory.png"), {"dense": {}, "logitless": {}}, 1024, 50_000)
    assert drawn == []
