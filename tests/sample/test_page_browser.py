"""The page of sampled text in a real browser: silent, the text whole, each token told about by mouse and keyboard."""

import math
from collections.abc import Iterator

import pytest

from logitless.printable import shown
from logitless.sample.page import page
from logitless.sample.shown import percent
from tests.support.sample.texts import HARD, byte_tokenizer, hard_summary
from tests.support.workbench.browser import CHROMIUM, CONTRAST, Browser, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)"),
]
ABOUT = "document.getElementById('about')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    return hard_summary(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def path(tmp_path_factory, summary):
    path = tmp_path_factory.mktemp("page") / "sample.html"
    path.write_text(page(summary), encoding="utf-8")
    return path


def told(browser: Browser) -> str:
    return browser.evaluate(f"{ABOUT}.hidden ? '' : {ABOUT}.innerText")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_loads_in_silence_and_fits(browser, path, scheme, width):
    browser.open(path, width=width, scheme=scheme)
    assert browser.complaints == []
    assert browser.requests == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert told(browser) == ""


def test_the_text_is_whole(browser, path, summary):
    browser.open(path)
    texts = browser.evaluate("[...document.querySelectorAll('.text')].map((text) => text.textContent)")
    prompts = [sequence["shown_prompt"] for sequence in summary["sequences"]]
    assert texts == [prompt + shown(text) for prompt, text in zip(prompts, HARD.values(), strict=True)]
    assert browser.evaluate("document.querySelectorAll('.text b').length") == 0


def expected(token) -> list[str]:
    numbers = [token["name"], percent(math.exp(token["logprob"])), f"{token['rank']:,}", f"{token['entropy']:.2f} nats"]
    best = [x for other in token["top_logprobs"] for x in (other["name"], percent(math.exp(other["logprob"])))]
    return [*numbers, *best]


def test_the_mouse_asks_about_any_token(browser, path, summary):
    browser.open(path, height=700)
    for s, t in ((0, 0), (0, 20), (1, 2), (3, 6), (5, 1), (7, 1)):
        place = f'.t[data-s="{s}"][data-t="{t}"]'
        browser.evaluate(f"document.querySelector('{place}').scrollIntoView({{block: 'center'}})")
        browser.point(place)
        text = told(browser)
        for part in expected(summary["sequences"][s]["tokens"][t]):
            assert part in text
        inside = (
            f"(() => {{ const b = {ABOUT}.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }})()"
        )
        left, top, right, bottom = browser.evaluate(inside)
        assert left >= 0
        assert top >= 0
        assert right <= 1200
        assert bottom <= 700
    browser.point("")
    assert told(browser) == ""
    assert browser.complaints == []


def test_a_keyboard_is_enough(browser, path, summary):
    browser.open(path)
    tokens = summary["sequences"][0]["tokens"]
    browser.press("Tab")
    assert tokens[0]["name"] in told(browser)
    for _ in range(3):
        browser.press("ArrowRight")
    at = browser.evaluate("[document.activeElement.dataset.s, document.activeElement.dataset.t]")
    assert at == ["0", "3"]
    assert f"id {tokens[3]['id']}" in told(browser)
    browser.press("End")
    assert f"id {tokens[-1]['id']}" in told(browser)
    browser.press("Escape")
    assert told(browser) == ""
    browser.press("Tab")
    names = browser.evaluate("[...document.querySelectorAll('.t')].map((t) => t.getAttribute('aria-label'))")
    assert all(name and "%" in name for name in names)
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser, path, scheme):
    """Contrast of at least 4.5 to 1, as WCAG 2 asks of text; what is told about a token included."""
    browser.open(path, scheme=scheme)
    browser.press("Tab")
    found = browser.evaluate(CONTRAST)
    assert len(found) > 100
    assert [(text, round(ratio, 2)) for text, ratio in found if ratio < 4.5] == []


def test_an_underscore_lies_on_its_tokens_own_ground(browser, path):
    """White on red, it would be white on white below the red."""
    browser.open(path)
    room = """(() => {
      const token = document.querySelector(".t.p4"), mark = document.createElement("i");
      mark.style.display = "inline-block";  // empty: it stands on the baseline
      token.append(mark);
      const pen = document.createElement("canvas").getContext("2d"), box = token.getClientRects();
      pen.font = getComputedStyle(token).font;
      return box[box.length - 1].bottom - mark.getBoundingClientRect().bottom
        - pen.measureText("_").actualBoundingBoxDescent;
    })()"""
    assert browser.evaluate(room) > 0
