"""The built site in a real browser: what is copied, what fits, what a dark page shows, what a search finds."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.workbench.browser import CHROMIUM, Browser, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)"),
]
ROOT = Path(__file__).parents[2]
# Each block's text beside what its copy button hands over, in the place of the machine's own clipboard.
COPIED = """(() => {
  const found = [];
  for (const block of document.querySelectorAll(".highlight")) {
    let taken = null;
    document.execCommand = () => { taken = document.activeElement.value; return true; };
    block.querySelector("button.md-code__button[data-md-type=copy]").click();
    found.push([block.querySelector("code").textContent, taken]);
  }
  return found;
})()"""
WIDE = """[...document.querySelectorAll("pre > code")].filter((code) => code.scrollWidth > code.clientWidth + 1)
  .map((code) => code.textContent.slice(0, 80))"""
CUT = """[...document.querySelectorAll(".md-typeset__scrollwrap")]
  .filter((box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.innerText.slice(0, 80))"""
# The mean light of each visible figure drawn over the page's ground, from 0 to 1.
FIGURES = """(async () => {
  const shown = [...document.querySelectorAll(".md-content img")].filter((image) => image.offsetParent !== null);
  return Promise.all(shown.map(async (image) => {
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: 64, height: 64 });
    const pen = canvas.getContext("2d");
    pen.fillStyle = getComputedStyle(document.body).backgroundColor;
    pen.fillRect(0, 0, 64, 64);
    pen.drawImage(image, 0, 0, 64, 64);
    const all = pen.getImageData(0, 0, 64, 64).data;
    return [image.src, all.reduce((sum, value, i) => sum + (i % 4 < 3 ? value : 0), 0) / (3 * 64 * 64 * 255)];
  }));
})()"""
SEARCH = """(async () => {
  const box = document.querySelector("[data-md-component=search-query]");
  box.focus();
  box.value = %r;
  box.dispatchEvent(new Event("input", { bubbles: true }));
  box.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
  const found = () => [...document.querySelectorAll(".md-search-result__item > a:first-of-type")];
  for (let tries = 0; !found().length && tries < 300; tries++) await new Promise((done) => setTimeout(done, 100));
  return found().map((a) => new URL(a.href).pathname.slice(1));
})()"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        """Nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    """The site served: its search needs more than files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def browser(tmp_path_factory) -> Iterator[Browser]:
    """A reader who was never here: the site remembers the colours that were chosen."""
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def test_what_is_copied_can_be_run(browser, address):
    for page in ("how-to/train/", "how-to/many-devices/", "recipes/", "how-to/own-loss/"):
        browser.visit(address + page, width=1280)
        for shown, copied in browser.evaluate(COPIED):
            assert copied
            lines = shown.splitlines()
            if shown.startswith("$ "):
                told = [line.removeprefix("$ ") for line in lines if line.startswith(("$ ", "    "))]
                assert copied.splitlines() == told
            else:
                assert copied.strip() == shown.strip()


def test_code_fits_its_column(browser, site, address):
    pages = [page.parent.relative_to(site).as_posix() + "/" for page in site.rglob("index.html")]
    assert len(pages) > 50
    for page in pages:
        browser.visit(address + page, width=1280)
        assert (page, browser.evaluate(WIDE)) == (page, [])
        assert browser.evaluate("document.documentElement.scrollWidth") <= 1280
        if page != "gpu-counts/":  # whose table of kernels has twelve columns
            assert (page, browser.evaluate(CUT)) == (page, [])


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_figures_follow_the_page(browser, address, scheme, dark):
    pages = {"": 1, "how-to/plan/": 2, "how-to/profile/": 1, "benchmark/": 2}
    for page, count in pages.items():
        browser.visit(address + page, width=1280, scheme=scheme)
        browser.evaluate("document.querySelectorAll('img').forEach((image) => image.loading = 'eager')")
        found = browser.evaluate(FIGURES)
        assert len(found) == count
        assert all((light < 0.5) is dark for _, light in found), found


def test_pages_follow_the_system_after_the_first_visit(browser, address):
    for scheme, dark in (("light", False), ("dark", True), ("light", False)):
        browser.visit(address + "benchmark/", width=1280, scheme=scheme)
        browser.evaluate("document.querySelectorAll('img').forEach((image) => image.loading = 'eager')")
        assert all((light < 0.5) is dark for _, light in browser.evaluate(FIGURES)), scheme


def test_the_home_page_has_a_figure_and_an_install_line(browser, address):
    browser.visit(address, width=1280, height=900)
    top = "document.querySelector('.md-content img:not([src$=\"#only-dark\"])').getBoundingClientRect().top"
    assert 0 < browser.evaluate(top) < 900
    assert "pip install ." in browser.evaluate("document.querySelector('.highlight code').innerText")


def test_a_search_finds_its_own_page_first(browser, address):
    pages = {
        "OOM": ("how-to/out-of-memory/",),
        "install": ("",),  # the home page
        "Trainer": ("how-to/transformers/",),
        "intuitor": ("how-to/intuitor/", "how-to/align/"),
        "PPO": ("how-to/policy/", "how-to/align/", "how-to/grade/"),
    }
    for query, wanted in pages.items():
        browser.visit(address, width=1280)
        assert browser.evaluate(SEARCH % query)[0] in wanted, query


@pytest.mark.parametrize("query", ["GRPO", "out of memory", "LoRA", "KL", "gather", "intuitor", "PPO", "OOM"])
def test_a_search_finds_what_to_do_before_why(browser, address, query):
    browser.visit(address, width=1280)
    found = browser.evaluate(SEARCH % query)
    first = found[0].partition("/")[0]
    assert first in ("how-to", "tutorials", "recipes", "api")
    kinds = [page.startswith("decisions/") for page in found]
    assert kinds == sorted(kinds)
