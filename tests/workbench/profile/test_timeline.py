"""A profile's picture: stages side by side, whatever the events of each recording."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from logitless.workbench.profile.recording import Recording
from logitless.workbench.profile.timeline import POINTS, draw

GIB = 1 << 30
STAGES = ("parameters", "optimizer state", "after embedding", "loss")


@pytest.fixture
def drawn(monkeypatch):
    """Draws recordings, and gives the axes in the place of the file."""

    def axes(recordings: dict[str, Recording], units: str = "GiB") -> Axes:
        seen: list[Axes] = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.extend(figure.axes))
        draw(recordings, Path("step.png"), "a title", units)
        return seen[0]

    return axes


def recording(*parts: list[int]) -> Recording:
    """A stage of each part, in GiB alive after its events."""
    curve, marks = [], []
    for name, part in zip(STAGES, parts, strict=True):
        curve += [GIB * n for n in part]
        marks.append((name, len(curve) - 1))
    return Recording([], curve, marks)


def test_a_stage_is_as_wide_as_its_events(drawn):
    """From where the step begins: neither the parameters nor the optimizer's state are drawn."""
    axes = drawn({"dense": recording([1], [2, 9], [3, 4], [5, 8, 6, 2, 1, 1])})
    curve, peak, between = axes.lines
    assert (curve.get_xdata()[0], curve.get_xdata()[-1]) == (0, pytest.approx(1))
    assert between.get_xdata() == pytest.approx([0.25, 0.25])  # two events of eight
    assert max(curve.get_ydata()) == 9
    assert curve.get_ydata()[-1] == 1
    eights = [x for x, y in zip(curve.get_xdata(), curve.get_ydata(), strict=True) if y == 8]
    assert eights == pytest.approx([0.25 + 0.75 * 2 / 6] * 2)  # the second event of the loss's six
    assert (list(peak.get_xdata()), list(peak.get_ydata())) == ([0], [9])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["embedding", "loss"]
    assert axes.get_ylabel() == "GiB alive"


def test_recordings_line_up(drawn):
    """A stage has the mean of its shares of the events, and some of the width, however few they are."""
    first = recording([1], [1], [1] * 8, [1] * 10)
    second = recording([1], [1], [1] * 8, [1] * 30)
    *_, between = drawn({"dense": first, "logitless": second}).lines
    shares = (8 / 20 + 8 / 40) / 2, (10 / 20 + 30 / 40) / 2
    assert between.get_xdata()[0] == pytest.approx(shares[0] / sum(shares))
    *_, between = drawn({"dense": recording([1], [1], [1], [1] * 997)}).lines
    assert between.get_xdata()[0] == pytest.approx(0.07 / (0.07 + 0.997))


def test_a_long_recording_keeps_its_highest_point(drawn):
    long = [2] * (5 * POINTS)
    long[4 * POINTS + 1] = 7
    curve, *_ = drawn({"dense": recording([1], [1], [1], long)}).lines
    assert max(curve.get_ydata()) == 7
    assert len(curve.get_xdata()) < 4 * POINTS


@pytest.mark.parametrize(("units", "limit"), [("GiB", 80), ("GB", 85.9)])
def test_a_gpus_memory_is_a_line_where_the_picture_reaches_it(drawn, units, limit):
    axes = drawn({"dense": recording([1], [1], [1], [41])}, units)
    assert axes.lines[-1].get_ydata()[0] == pytest.approx(limit, abs=0.05)
    assert f"a GPU of {limit:.0f} {units}" in [text.get_text() for text in axes.texts]
    assert max(axes.lines[0].get_ydata()) == pytest.approx(41 * limit / 80, abs=0.1)
    below = drawn({"dense": recording([1], [1], [1], [39])}, units)
    assert not any("a GPU" in text.get_text() for text in below.texts)
