"""A plan's picture: bars as high as the peaks, dense on the left, and the line that they must stay below."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from logitless.models.catalog import shape_of
from logitless.workbench.plan.plan import both
from logitless.workbench.plan.plots import CATEGORIES, _number, category, draw
from logitless.workbench.plan.setting import GIB, Setting

SETTING = Setting(shape_of("qwen2.5-1.5b"), "ppo", batch_size=8, prompt_length=512, response_length=2048)


@pytest.fixture
def drawn(monkeypatch):
    """Draws a setting, and gives the axes in the place of the file."""

    def axes(setting: Setting, units: str) -> Axes:
        seen: list[Axes] = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.extend(figure.axes))
        draw(*both(setting), Path("plan.png"), units)
        return seen[0]

    return axes


@pytest.mark.parametrize(("units", "size"), [("GiB", GIB), ("GB", 10**9)])
def test_bars_are_as_high_as_the_peaks(drawn, units, size):
    axes = drawn(SETTING, units)
    tops: Counter[float] = Counter()
    for bar in axes.patches:
        assert bar.get_y() == pytest.approx(tops[round(bar.get_x(), 2)])  # on top of one another
        tops[round(bar.get_x(), 2)] += bar.get_height()
    phases = SETTING.kind.phases
    for offset, plan in zip((-0.4, 0.02), both(SETTING), strict=True):
        for x, phase in enumerate(phases):
            assert tops[round(x + offset, 2)] == pytest.approx(plan.peaks[phase] / size), phase
    assert len(tops) == 2 * len(phases)
    assert [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()] == list(phases)
    assert axes.lines[0].get_ydata()[0] == pytest.approx(78 * GIB / size)  # of 80, 2 in reserve
    assert axes.get_ylim()[1] > max(tops.values())


def test_a_category_has_its_own_colour_and_height(drawn):
    dense, _ = both(SETTING)
    bars = drawn(SETTING, "GiB").patches[: len(CATEGORIES)]  # of the first phase of the dense way, the last one first
    for bar, (label, *_) in zip(bars, reversed(CATEGORIES), strict=True):
        alive = [c.nbytes for c in dense.components if "rollout" in c.phases and category(c.name) == label]
        assert bar.get_height() == pytest.approx(sum(alive) / GIB), label


@pytest.mark.parametrize(
    ("size", "said"), [(0.478, "0.48"), (9.94, "9.9"), (9.96, "10"), (66.4, "66"), (1234.2, "1,234")]
)
def test_numbers_have_two_digits_at_least(size, said):
    assert _number(size) == said


def test_the_line_says_what_is_usable(drawn):
    setting = replace(SETTING, gpu_bytes=11 * GIB)
    *numbers, usable = [text.get_text() for text in drawn(setting, "GiB").texts]
    assert usable == "usable: 9 GiB"
    assert numbers == [_number(peak / GIB) for plan in both(setting) for peak in plan.peaks.values()]
