"""Every ```python block of the README and of the docs runs; the blocks of a page share one namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = {"many-devices.md"}  # starts ranks of its own
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
    """The code of each block, pushed down to its own line of the page, so that tracebacks point there."""
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in BLOCK.finditer(text)]


def case(page: Path):
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] * (page.name in SLOW))


@pytest.mark.parametrize("page", [case(p) for p in PAGES if BLOCK.search(p.read_text("utf-8"))])
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for code in blocks(page.read_text("utf-8")):
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("name", ["README.md", "quickstart.md", "maths.md", "prices.md", "loop-over-rows.md"])
def test_pages_that_must_have_code_have_it(name):
    (page,) = (p for p in PAGES if p.name == name)
    assert BLOCK.search(page.read_text("utf-8"))


def test_a_failing_block_is_seen_at_its_own_line():
    (code,) = blocks("# Title\n\n```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        exec(compile(code, "page", "exec"), {})
    assert caught.tb.tb_next.tb_lineno == 4


def test_the_readme_is_short_and_in_order():
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= 120
    places = [text.index(mark) for mark in ("```python", "make demo", "<!-- bench:begin -->", "not do", "## Links")]
    assert places == sorted(places)
