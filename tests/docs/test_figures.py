"""Each figure is there for a light and for a dark page, of the committed results, and every page shows both or none."""

import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from docs.figures import FIGURES, INKS, OF_RESULTS, source

ROOT = Path(__file__).parents[2]
IMAGES = sorted(
    path for path in (ROOT / "docs" / "images").iterdir() if path.name != "demo.png"
)  # a page, not a figure
NAMES = sorted({path.stem.rpartition("-")[0] for path in IMAGES})


def test_figures_come_in_pairs():
    assert {path.name for path in IMAGES} == {f"{name}-{page}.png" for name in NAMES for page in INKS}
    assert set(FIGURES) < set(NAMES)


@pytest.mark.parametrize("name", FIGURES)
def test_a_drawn_figure_has_no_ground_of_its_own(name):
    for page in INKS:
        with Image.open(ROOT / "docs" / "images" / f"{name}-{page}.png") as image:
            assert image.getpixel((0, 0))[3] == 0


@pytest.mark.parametrize("name", OF_RESULTS)
def test_a_drawn_figure_is_of_the_committed_results(name):
    for page in INKS:
        with Image.open(ROOT / "docs" / "images" / f"{name}-{page}.png") as image:
            assert image.info.get("Source") == source(name), f"run python -m docs.figures --only {name}"


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
def test_a_page_shows_both(page):
    shown = Counter(re.findall(r"images/(\w+)-(light|dark)\.png(?:#only-(\w+))?", (ROOT / page).read_text("utf-8")))
    for (name, scheme, only), count in shown.items():
        other = "dark" if scheme == "light" else "light"
        assert only in ("", scheme)
        assert shown[name, other, other if only else ""] == count
