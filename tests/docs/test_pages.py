"""Every ```python block of the README and of the docs runs, and imports public names alone; the blocks of a page share
one namespace.
"""

import ast
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import chdir
from importlib import import_module
from pathlib import Path

import pytest
from markdown import Markdown
from mkdocs.config import load_config
from mkdocs.exceptions import PluginError
from mkdocs.utils.meta import get_data

import logitless.errors
from docs import hooks
from logitless.vocab.call import triton_support
from tests.support import forked
from tests.support.switches import put_back

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = {"many-devices.md"}  # starts ranks of its own
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


ANY_BLOCK = re.compile(r"^```py(?:thon)?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
MODULES = {"logitless", "logitless.errors", *(f"logitless.{name}" for name in hooks.MODULES)}
ENTRY = re.compile(r"^::: ([\w.]+)$", flags=re.MULTILINE)


def imported(code: str) -> set[str]:
    """The modules of logitless that some code imports, and the names that it imports from modules."""
    nodes = list(ast.walk(ast.parse(code)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return {name for name in plain | named if name.partition(".")[0] == "logitless"}


def is_public(name: str, documented: set[str]) -> bool:
    """Whether the API page has this name, or it is of a module whose names all are public."""
    errors = [each for each in vars(logitless.errors) if each.endswith("Error")]
    module, _, own = name.rpartition(".")
    if name in documented | MODULES:
        return True
    return module in MODULES and own in getattr(import_module(module), "__all__", errors)


def blocks(text: str) -> list[str]:
    """The code of each block, pushed down to its own line of the page, so that tracebacks point there."""
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in BLOCK.finditer(text)]


def case(page: Path):
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] * (page.name in SLOW))


@pytest.fixture
def level_left_as_it_was():
    """A page that listens to the logger would have its kinds of call told before a later test's."""
    logger = logging.getLogger("logitless")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("page", [case(p) for p in PAGES if BLOCK.search(p.read_text("utf-8"))])
def test_code_runs(page, tmp_path, monkeypatch, level_left_as_it_was):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(triton_support, "interpreted", lambda: False)  # as for users: a kernel would run for seconds
    code_of_page = blocks(page.read_text("utf-8"))
    if page.name not in SLOW and any("subprocess.run" in code for code in code_of_page):
        monkeypatch.setattr("subprocess.run", forked.run)  # commands, which would import for seconds
    namespace = {"__name__": "page"}
    with put_back():
        for code in code_of_page:
            exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("name", ["README.md", "quickstart.md", "maths.md", "prices.md", "loop-over-rows.md"])
def test_pages_that_must_have_code_have_it(name):
    (page,) = (p for p in PAGES if p.name == name)
    assert BLOCK.search(page.read_text("utf-8"))


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_pages_import_public_names_or_say_that_they_do_not(page):
    text = page.read_text("utf-8")
    documented = set(ENTRY.findall((ROOT / "docs" / "api.md").read_text("utf-8")))
    names = set().union(*(imported(found[1]) for found in ANY_BLOCK.finditer(text)))
    private = {name for name in names if not is_public(name, documented)}
    assert not private or "not public" in " ".join(text.split())


@pytest.fixture(scope="module")
def rendered() -> Iterator[Callable[[str], str]]:
    """Markdown as the site has it, but for the API page's docstrings."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    converter = Markdown(extensions=config.markdown_extensions, extension_configs=config.mdx_configs)
    with chdir(ROOT):  # by which snippets are found
        yield lambda text: converter.reset().convert(text)


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES[1:]])
def test_code_fits_its_column(page, rendered):
    text, meta = get_data(page.read_text("utf-8"))
    hooks.check_columns(rendered(text), meta, page.name)


def test_code_that_does_not_fit_is_found(rendered):
    text, meta = get_data("---\nhide: [toc]\n---\n```python\n" + "x" * 101 + "\n```\n")
    hooks.check_columns(rendered(text), meta, "page")
    with pytest.raises(PluginError, match="page: 100 columns of code fit, 1 lines have more: xxx"):
        hooks.check_columns(rendered(text), {}, "page")


def placeholders(text: str) -> list[str]:
    """Lines that a text was to replace: a name in capitals and nothing else."""
    return re.findall(r"^@?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+@?$", text, re.MULTILINE)


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_nothing_waits_for_its_text(page):
    assert placeholders(page.read_text("utf-8")) == []


def test_a_placeholder_is_found():
    assert placeholders("# Title\n\nSCORE_PARAGRAPH\n\nREADME\n") == ["SCORE_PARAGRAPH"]


def test_a_private_import_is_found():
    code = "import logitless as ll\nfrom logitless.vocab.call.call import Call\nfrom logitless.sample import Noise"
    assert {name for name in imported(code) if not is_public(name, set())} == {"logitless.vocab.call.call.Call"}


def test_a_failing_block_is_seen_at_its_own_line():
    (code,) = blocks("# Title\n\n```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        exec(compile(code, "page", "exec"), {})
    assert caught.tb.tb_next.tb_lineno == 4


def test_the_readme_is_short_and_in_order():
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= 120
    places = [
        text.index(mark) for mark in ("```python", "\nmake demo", "<!-- table: summary -->", "not do", "## Links")
    ]
    assert places == sorted(places)
