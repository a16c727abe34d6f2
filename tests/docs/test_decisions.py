"""What decision records say is held by a test, is."""

import re

import pytest

from docs.tables import ROOT

PAGES = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
TESTS = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page):
    text = page.read_text("utf-8")
    named = re.findall(r"`(test_\w+)`", text)
    assert [name for name in named if f"def {name}(" not in TESTS] == []
    files = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_some_are_named():
    assert any("`test_" in page.read_text("utf-8") for page in PAGES)
