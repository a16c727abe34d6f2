"""What decision records say is held by a test, is; the index by topic lists each of them by its title."""

import re

import pytest

from docs.tables.pages import ROOT

INDEX = ROOT / "docs" / "decisions" / "index.md"
ROW = re.compile(
    r"^\| \[(.+)\]\((\d{4}-[\w-]+\.md)\) \| (kept|kept, off by default|dropped|replaced) \| .+ \|$", re.MULTILINE
)
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


def title(page) -> str:
    return page.read_text("utf-8").partition("\n")[0].removeprefix("# ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_title_has_the_number_and_the_subject(page):
    number, _, subject = title(page).partition(": ")
    assert number == page.name[:4]
    assert len(subject.split()) >= 4


def test_the_index_lists_each_page_once_under_a_topic():
    text = INDEX.read_text("utf-8")
    listed = sorted((name, shown) for shown, name, _ in ROW.findall(text))
    assert listed == [(page.name, title(page)) for page in PAGES]
    topics = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert len(topics) == len(set(topics)) == 10  # nine, and the list by number that the docs build adds


def test_what_the_index_calls_replaced_says_so():
    replaced = {name for _, name, status in ROW.findall(INDEX.read_text("utf-8")) if status == "replaced"}
    assert replaced == {page.name for page in PAGES if "Status: replaced" in page.read_text("utf-8")}
