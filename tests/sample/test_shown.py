"""Sampled text on a terminal and on a page: safe, whole, and the right numbers and colours."""

import io
import json
import math
import re

import pytest
from rich.console import Console

from logitless.sample.page import page
from logitless.sample.shown import CLASSES, class_names, class_of, percent, to_dict
from logitless.sample.terminal import STYLES, coloured, show, streamed
from tests.support.sample.texts import HARD, byte_tokenizer, hard_summary, made_up


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    return hard_summary(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def printed(summary, alternatives=False, width=100, **options) -> str:
    file = io.StringIO()
    show(summary, Console(file=file, width=width, **options), alternatives)
    return file.getvalue()


def test_what_is_described(summary):
    assert json.loads(json.dumps(summary)) == summary
    for text, sequence in zip(HARD.values(), summary["sequences"], strict=True):
        assert sequence["text"] == text.removesuffix("</s>")
        logprobs = [token["logprob"] for token in sequence["tokens"]]
        assert sequence["perplexity"] == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)), rel=1e-5)
        for token in sequence["tokens"]:
            assert len(token["top_logprobs"]) == 3
            best = {other["id"]: other["logprob"] for other in token["top_logprobs"]}
            assert best.get(token["id"], token["logprob"]) == pytest.approx(token["logprob"], abs=1e-5)
            assert token["rank"] <= 3 or token["id"] not in best


def test_id_0_is_a_token_as_any_other(tmp_path):
    about = to_dict(made_up([0, 70]), byte_tokenizer(tmp_path), [])
    assert [token["id"] for token in about["tokens"]] == [0, 70]


def test_what_comes_token_by_token_is_the_text_with_its_colours(summary, tmp_path):
    """Styles of every character, as at the end; bytes of a character wait for its last one."""
    tokenizer = byte_tokenizer(tmp_path)
    for name, sequence in zip(HARD, summary["sequences"], strict=True):
        ids = [token["id"] for token in sequence["tokens"]]
        steps, pieces = made_up(ids), []
        console = Console(file=io.StringIO(), width=20, force_terminal=True, color_system="truecolor")
        with streamed(console, tokenizer, sequence["shown_prompt"], tokenizer(sequence["prompt"])["input_ids"]) as put:
            for t in range(len(ids)):
                before = console.file.tell()
                put(steps[t : t + 1])
                pieces.append(console.file.getvalue()[before:])
        whole = Console(file=io.StringIO(), width=1000, force_terminal=True, color_system="truecolor")
        whole.print(coloured(sequence), highlight=False)
        assert by_character(console.file.getvalue()) == by_character(whole.file.getvalue()), name
        assert [bool(piece) for piece in pieces] == [bool(token["shown"]) for token in sequence["tokens"]], name


def by_character(printed: str) -> list[tuple[str, str]]:
    """Each character with the escape sequence that its style is."""
    out, style = [], ""
    for part in re.split(r"(\x1b\[[\d;]*m)", printed):
        if part.startswith("\x1b"):
            style = "" if part == "\x1b[0m" else part
        else:
            out += [(letter, style) for letter in part]
    return out


def test_without_colours_it_is_the_text(summary):
    text = printed(summary)
    assert "\x1b" not in text
    assert "\x1b" not in printed(summary, alternatives=True)
    assert "if a < b & c > d: '</script><b>\"" in text
    assert "🙂 👩‍👩‍👧 👍🏽 é" in text
    assert "a\\u202eb\\u2066c\\u2028d" in text
    assert "  a→   b↵\n↵\n   c \\x0d↵\n" in text


def test_what_the_model_wrote_sends_nothing_to_the_terminal(summary):
    text = printed(summary, force_terminal=True, color_system="truecolor")
    assert re.sub(r"\x1b\[[\d;]*m", "", text) == printed(summary)
    assert set(re.findall(r"[\x00-\x09\x0b-\x1a\x1c-\x1f\x7f-\x9f]", text)) == set()


def test_each_token_has_the_colour_of_its_probability(summary):
    sequence = summary["sequences"][0]
    text = coloured(sequence)
    lead = len(sequence["shown_prompt"])
    for i, token in enumerate(sequence["tokens"]):
        styles = [span.style for span in text.spans if span.start <= lead + i < span.end]
        assert styles == [s for s in [STYLES[class_of(math.exp(token["logprob"]))]] if s]
    assert len({span.style for span in text.spans}) > 3


def test_the_bytes_of_a_character_share_a_colour(summary):
    sequence = summary["sequences"][1]  # naïve
    first, second = sequence["tokens"][2:4]
    assert (first["shown"], second["shown"]) == ("", "ï")
    only = {**sequence, "tokens": [first, second], "shown_prompt": ""}
    low = {**only, "tokens": [first | {"logprob": math.log(0.1)}, second | {"logprob": math.log(0.3)}]}
    assert [span.style for span in coloured(low).spans] == [STYLES[class_of(0.03)]]


def test_alternatives(summary):
    text = printed({**summary, "sequences": summary["sequences"][:1]}, alternatives=True)
    tokens = summary["sequences"][0]["tokens"]
    rows = [line for line in text.splitlines() if re.match(r" *\d+  ", line)]
    assert len(rows) == len(tokens)
    for row, token in zip(rows, tokens, strict=True):
        assert f"{token['rank']:,}" in row
        assert percent(math.exp(token["logprob"])) in row
        others = [other for other in token["top_logprobs"] if other["id"] != token["id"]]
        assert percent(math.exp(others[0]["logprob"])) in row
        assert row.rstrip().count("%") == 1 + len(others)


def test_lines_of_alternatives_end_between_two_of_them(summary):
    first = {**summary, "sequences": summary["sequences"][:1]}
    text = printed(first, alternatives=True, width=60)
    for token in summary["sequences"][0]["tokens"]:
        for other in token["top_logprobs"]:
            if other["id"] != token["id"]:
                assert f"{other['name']} {percent(math.exp(other['logprob']))}" in text


def test_classes():
    assert [class_of(p) for p in (1.0, 0.9, 0.89, 0.5, 0.2, 0.05, 0.049, 0.0)] == [0, 0, 1, 1, 2, 3, 4, 4]
    assert len(class_names()) == len(STYLES) == len(CLASSES) + 1
    shares = (1.0, 0.1234, 0.05, 0.00012345, 0.0)
    assert [percent(p) for p in shares] == ["100.0 %", "12.3 %", "5.0 %", "0.012 %", "0 %"]


def test_a_page_is_whole_and_safe(summary):
    text = page(summary)
    assert not re.findall(r"\{\{\w*\}\}", text)
    assert not re.findall(r"https?://", text)
    assert not re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=\"(?!data:)", text)
    assert "default-src 'none'" in text
    assert text.count("</script>") == 1
    assert "<b>" not in text
    assert "<title>&lt;model&gt;, sampled</title>" in text
    assert "\x1b" not in text
    assert not set("\u202e\u2066\u2028\x07\x00\x9b") & set(text)
    assert text.count('class="t ') == sum(len(s["tokens"]) for s in summary["sequences"])
    braces = {**summary, "model": "{{title}}", "options": {}}
    assert "<h1>{{title}}, sampled</h1>" in page(braces)
