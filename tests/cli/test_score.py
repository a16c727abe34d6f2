"""`logitless score` from its command line: the summary, JSON, one line for bad input."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from logitless.cli import score
from logitless.cli.main import main
from logitless.cli.options import parse
from logitless.workbench.scoring.config import ScoreConfig
from tests.support.workbench.micro import micro_directory, micro_model
from tests.support.workbench.options import at_default


@pytest.fixture(scope="module")
def micro_scored(tmp_path_factory) -> Path:
    """The directory of a micro model with weights."""
    place = tmp_path_factory.mktemp("scored")
    micro_directory(place)
    micro_model().save_pretrained(place)
    return place


@pytest.fixture
def corpus(tmp_path) -> Path:
    place = tmp_path / "texts"
    place.mkdir()
    (place / "a.txt").write_text("one text, and then the end")
    (place / "b.jsonl").write_text('{"text": "another"}\n{"title": "x"}\n')
    return place


def test_every_option_of_the_dataclass_is_one_of_the_command_line():
    given = (
        "--model m --data d --out o --documents l --keep 3 --context-length 64 --stride 8 --bos yes --batch-tokens 9 "
        "--memory-budget 1GiB --dtype bfloat16 --device cpu --json j --store hidden --hidden-dtype fp8"
    )
    expected = ScoreConfig("m", "d", 64, 8, "yes", 9, "1GiB", "bfloat16", "cpu", Path("j"), Path("o"), Path("l"), 3)
    expected = replace(expected, store="hidden", hidden_dtype="fp8")
    assert parse(ScoreConfig, prog="x", description=score.DESCRIPTION, arguments=given.split()) == expected
    assert at_default(expected) == set()


def test_a_summary_for_people_and_for_machines(micro_scored, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", str(micro_scored), "--data", str(corpus), "--device", "cpu", "--json", "-"]
    assert main(["score", *arguments]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["schema"] == 1
    assert (summary["documents"], summary["skipped"], summary["scored_tokens"]) == (3, 1, 25 + 6)
    for shown in ("perplexity", "bits per byte", "tokens/s", "peak memory", "b.jsonl:2: no field named text"):
        assert shown in err
    assert pq.read_metadata("texts.scores.parquet").num_rows == summary["tokens"] == 33


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--data is missing"),
        (["--data", ""], "--data is empty: give a value, or leave it out"),
        (["--output", "a.parquet"], "--output, a.parquet; did you mean --out?"),
        (["--data", "none"], "--data none: no such file or directory"),
        (["--data", ".", "--keep", "300"], "--keep must be at most the vocabulary, here 259"),
        (["--data", ".", "--bos", "maybe"], "--bos"),
        (["--data", ".", "--model", "none/where"], "--model none/where"),
        (
            ["--data", ".", "--model", "nope"],
            "--model nope: expected a directory with weights to score with",
        ),
    ],
)
def test_bad_input_is_one_line(micro_scored, tmp_path, given, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["score", "--model", str(micro_scored), "--device", "cpu", *given]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
