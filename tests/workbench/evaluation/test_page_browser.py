"""The page of an evaluation in a real browser: silent, legible, and as wide as the screen."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from logitless.workbench.evaluation.run import run
from tests.support.workbench.browser import CHROMIUM, CONTRAST, Browser, chromium
from tests.workbench.evaluation.conftest import options
from tests.workbench.scoring.conftest import corpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def path(micro, near, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("page")
    run(options(micro, corpus(place / "a<b>.jsonl", 12), place / "e", against=str(near)))
    return place / "e" / "page.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_loads_in_silence_and_fits(browser, path, scheme, width):
    browser.open(path, width=width, scheme=scheme)
    assert browser.complaints == []
    assert browser.requests == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert min(contrast for _, contrast in browser.evaluate(CONTRAST)) >= 4.5


def test_every_plot_has_its_marks(browser, path):
    browser.open(path)
    marks = "[...document.querySelectorAll('svg')].map((s) => s.querySelectorAll('.bar, .point').length)"
    counts = browser.evaluate(marks)
    assert len(counts) == 5
    assert min(counts) >= 3
    assert "a<b>.jsonl" in browser.evaluate("document.querySelector('h1').textContent")
