"""Gemma 3 270M, with its 262,144 entries: `make test-gemma3` installs its packages, under Gemma's own terms."""

import json

import pytest

from logitless.cli.main import main
from logitless.models.catalog import shape_of
from logitless.models.pretrained import file_of_package
from tests.support.workbench.real import CACHE, real_model

PROSE = "The cat sat on the mat and looked out of the window at the birds in the garden."


@pytest.fixture(autouse=True)
def gemma(monkeypatch, tmp_path):
    name = real_model("gemma3-270m")
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.chdir(tmp_path)
    return name


def told(capsys, *arguments) -> dict:
    assert main([*map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_knows_something(capsys):
    greedy = ("--max-new-tokens", 8, "--temperature", 0, "--device", "cpu")
    found = told(capsys, "sample", "--model", "gemma3-270m", "--prompt", "The capital of France is", *greedy)
    assert "Paris" in found["sequences"][0]["text"]


def test_prose_is_likelier_than_its_words_in_disorder(capsys, tmp_path):
    """Its texts begin with the begin-of-text token, so every token of them has a score."""
    lines = [PROSE, " ".join(sorted(PROSE.split()))]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    arguments = ("--data", "lines.jsonl", "--documents", "each.jsonl", "--context-length", 64, "--device", "cpu")
    summary = told(capsys, "score", "--model", "gemma3-270m", *arguments)
    assert summary["scored_tokens"] == summary["tokens"]
    prose, disorder = (json.loads(line)["perplexity"] for line in (tmp_path / "each.jsonl").read_text().splitlines())
    assert prose < 40 < 100 < disorder


def test_it_trains_from_a_text_that_begins_as_gemmas_do(capsys, tmp_path, monkeypatch):
    nothing = {name: {"not_measured": "test"} for name in ("logitless", "dense")}
    monkeypatch.setattr("logitless.workbench.sft.run.measure", lambda config, tokens: nothing)
    (tmp_path / "text.txt").write_text(PROSE * 12)
    size = ("--context-length", 64, "--batch-size", 1, "--max-steps", 3, "--lora-rank", 4, "--learning-rate", 1e-2)
    run = ("--output-dir", "run", "--device", "cpu")
    summary = told(capsys, "train", "--model", "gemma3-270m", "--data", "text.txt", *size, *run)
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"]


def test_its_shape_is_the_presets():
    with file_of_package("gemma3-270m") as file:
        assert shape_of(str(file)).parameters == shape_of("gemma3-270m").parameters
