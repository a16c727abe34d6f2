"""`logitless eval` from its command line: the table, JSON, the folder, one line for bad input."""

import json
import sys
from pathlib import Path

import pytest

from logitless.cli import eval as command
from logitless.cli.main import main
from logitless.cli.options import parse
from logitless.workbench.evaluation.config import EvalConfig
from tests.support.workbench.micro import micro_directory, micro_model
from tests.support.workbench.options import at_default


@pytest.fixture(scope="module")
def micro_evaluated(tmp_path_factory) -> Path:
    """The directory of a micro model with weights."""
    place = tmp_path_factory.mktemp("evaluated")
    micro_directory(place)
    micro_model().save_pretrained(place)
    return place


def test_every_option_of_the_dataclass_is_one_of_the_command_line():
    given = (
        "--model m --data d --context-length 64 --stride 8 --bos yes --batch-tokens 9 --memory-budget 1GiB "
        "--dtype bfloat16 --device cpu --json j --tasks a b --num-fewshot 1 --limit 6 --against n --out o --top-k 2 3 "
        "--bins 4"
    )
    expected = EvalConfig(
        model="m",
        data="d",
        context_length=64,
        stride=8,
        bos="yes",
        batch_tokens=9,
        memory_budget="1GiB",
        dtype="bfloat16",
        device="cpu",
        json=Path("j"),
        tasks=("a", "b"),
        num_fewshot=1,
        limit=6,
        against="n",
        out=Path("o"),
        top_k=(2, 3),
        bins=4,
    )
    assert parse(EvalConfig, prog="x", description=command.DESCRIPTION, arguments=given.split()) == expected
    assert at_default(expected) == set()


@pytest.mark.parametrize("words", ["eval", "score"])
def test_help_names_what_data_may_be(words, capsys):
    with pytest.raises(SystemExit):
        main([words, "--help"])
    told = capsys.readouterr().out
    assert all(kind in told for kind in ("jsonl", "parquet", "conversations", "`datasets`"))


def test_a_table_for_people_and_json_for_machines(micro_evaluated, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text('{"text": "one text, and then the end"}\n{"title": "x"}\n{"text": "another"}\n')
    arguments = ["--model", str(micro_evaluated), "--data", "texts.jsonl", "--device", "cpu", "--json", "-"]
    assert main(["eval", *arguments, "--against", str(micro_evaluated)]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert (summary["schema"], summary["documents"], summary["skipped"], summary["scored_tokens"]) == (1, 3, 1, 25 + 6)
    for shown in ("perplexity", "bits per byte", "calibration error", "same best entry", "self-certainty", "page.html"):
        assert shown in err
    assert "texts.jsonl:2: no field named text" in err
    assert json.loads(Path("texts.eval/summary.json").read_text()) == summary
    assert "<svg" in Path("texts.eval/page.html").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--data is missing"),
        (["--data", "none"], "--data none: no such file or directory"),
        (["--data", ".", "--top-k", "0"], "--top-k must be numbers of 1 or more, got 0"),
        (["--data", ".", "--bins", "0"], "--bins must be at least 1"),
        (["--data", ".", "--context-length", "65"], "positions up to 64"),
        (["--data", ".", "--bos", "maybe"], "--bos"),
        (["--data", ".", "--model", "nope"], "--model nope: expected a directory with weights to evaluate"),
        (["--data", ".", "--tasks", "a"], "--data and --tasks: expected one of them"),
        (["--tasks", "a", "--against", "b"], "--against compares two models on --data"),
        (["--tasks", "a", "--batch-tokens", "64"], "--batch-tokens is of --data, got it with --tasks: leave it out"),
        (["--tasks", "a", "--context-length", "1"], "--context-length must be at least 2 (a token and its successor)"),
        (["--tasks", "a", "--limit", "0"], "--limit must be at least 1"),
        (["--tasks", "a", "--num-fewshot", "-1"], "--num-fewshot must be 0 or more"),
        (["--tasks", "a"], "--tasks needs lm-eval, which is not installed: pip install lm-eval"),
        (["--data", ".", "--against", ""], "--against is empty: give a value, or leave it out"),
        (["--data", ".", "--against", "none/where"], "--against none/where: "),
        (["--data", ".", "--against", "nope"], "--against nope: expected a directory with weights to compare with"),
    ],
)
def test_bad_input_is_one_line(micro_evaluated, tmp_path, given, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "lm_eval.tasks", raising=False)
    assert main(["eval", "--model", str(micro_evaluated), "--device", "cpu", *given]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
