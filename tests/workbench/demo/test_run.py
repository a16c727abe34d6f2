"""The demo on a micro model: what it writes, and that its page and its numbers are of text that was not trained on."""

import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from logitless.cli.main import main
from logitless.errors import ConfigError, OptionError
from logitless.workbench.demo.config import DemoConfig
from logitless.workbench.demo.run import HELD_OUT_EVERY, QUESTIONS, questions, run
from logitless.workbench.sources.chat import example
from logitless.workbench.sources.tokenizer import pretrained
from tests.support.workbench.micro import micro_directory, micro_model

TEMPLATE = "{% for m in messages %}<s>{{ m['role'][0] }}\n{{ m['content'] }}</s>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<s>a\n{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    micro_directory(place)
    micro_model(max_position_embeddings=512).save_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def config(model):
    return DemoConfig(model=str(model), max_steps=24, max_new_tokens=8, learning_rate=3e-2, device="cpu")


@pytest.fixture(scope="module")
def done(config, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "demo"
    return place, run(replace(config, output_dir=place), Console(quiet=True))


def test_it_learns_and_says_so_on_its_page(done):
    place, summary = done
    before, after = summary["before"]["perplexity"], summary["after"]["perplexity"]
    assert after < 0.9 * before
    text = (place / "demo.html").read_text()
    assert f"{before:.1f} → {after:.1f}" in text
    trained, every = (summary["training"][name] for name in ("trainable_parameters", "parameters"))
    assert f"LoRA trains {trained:,} parameters, of {every:,} parameters in all" in text
    assert summary["page"] == str(place / "demo.html")
    assert text.count('<img alt="') == 2
    assert all(question in text for question in (*QUESTIONS, *summary["questions"]["held_out"]))
    assert not re.search(r'(src|href)="http', text)
    shown = [summary[when][kind][i] for when in ("before", "after") for kind in ("answers", "read") for i in (0, 1)]
    assert text.count('<span class="t p') == sum(len(each["tokens"]) for each in shown)
    places = [(int(number), int(t)) for number, t in re.findall(r'data-s="(\d+)" data-t="(\d+)"', text)]
    assert places == sorted(places)  # of the facts behind each token
    assert {number for number, _ in places} == set(range(8))
    memory = summary["training"]["step_memory"]
    times = memory["dense"]["peak_bytes"] / memory["logitless"]["peak_bytes"]
    assert f"{times:.1f} × as much" in text
    answers = [each for when in ("before", "after") for each in summary[when]["answers"]]
    assert text.count(">cut off after ") == sum(not each["tokens"][-1]["special"] for each in answers) > 0


def test_answers_are_drawn_at_the_temperature_that_is_told(done):
    """Which divides p^(1/T) by its sum: the mean of p^(1/T - 1), between what the entropy and the best entry allow."""
    _, summary = done
    power = 1 / summary["temperature"] - 1
    for token in (x for when in ("before", "after") for each in summary[when]["answers"] for x in each["tokens"]):
        log_sum = token["logprob"] * (power + 1) - token["behaviour_logprob"]
        assert -power * token["entropy"] - 1e-4 < log_sum < power * token["top_logprobs"][0]["logprob"] + 1e-4


def test_the_perplexity_is_the_runs_own_held_out_loss(done, model):
    """Of the answers' tokens alone, in other batches: where none is cut off, the two are one number."""
    _, summary = done
    nats = [-token["logprob"] for text in summary["before"]["read"] for token in text["tokens"]]
    said = [example(row, pretrained(str(model)), "held out").said for row in questions()[1]]
    assert summary["before"]["tokens"] == summary["after"]["tokens"] == len(nats) == sum(x.sum() for x in said)
    assert math.log(summary["before"]["perplexity"]) == pytest.approx(sum(nats) / len(nats))
    assert math.log(summary["before"]["perplexity"]) == pytest.approx(
        summary["training"]["held_out_loss_before"], rel=0.02
    )


def test_nothing_that_is_read_was_trained_on():
    train, held = questions()
    assert len(train) + len(held) == 50
    assert len(held) == 50 // HELD_OUT_EVERY
    asked = {row["messages"][0]["content"] for row in train}
    assert asked.isdisjoint(row["messages"][0]["content"] for row in held)
    assert asked.isdisjoint(QUESTIONS)
    answers = {row["messages"][1]["content"] for row in train}
    assert answers.isdisjoint(row["messages"][1]["content"] for row in held)


def test_a_place_that_is_not_empty(done, config):
    with pytest.raises(OptionError, match=r"--output-dir .* is not empty"):
        run(replace(config, output_dir=done[0]), Console(quiet=True))


@pytest.mark.parametrize("name", ["demo.html", "text", "train/summary.json"])
def test_no_output_is_what_the_demo_itself_writes(config, name, tmp_path, capsys):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    call = ["demo", "--model", config.model, "--output-dir", str(tmp_path), "--json", str(tmp_path / name)]
    assert main(call) == 2
    assert f"--json {tmp_path / name} is among what the run itself writes into {tmp_path}" in capsys.readouterr().err


def test_json_is_not_the_demos_folder(config, tmp_path, capsys):
    place = str(tmp_path / "d")
    assert main(["demo", "--model", config.model, "--output-dir", place, "--json", place]) == 2
    assert f"--json {place}: expected a file, got the folder that the run writes into" in capsys.readouterr().err


def test_a_model_without_a_template(config, tmp_path):
    micro_directory(tmp_path)
    micro_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="the demo expects a chat template, its tokenizer has none"):
        run(replace(config, model=str(tmp_path), output_dir=tmp_path / "out"), Console(quiet=True))


def test_on_the_command_line(done, monkeypatch, capsys):
    _, summary = done
    monkeypatch.setattr("logitless.workbench.demo.run.run", lambda config, console: summary)
    assert main(["demo", "--model", summary["model"], "--json", "-"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["page"] == summary["page"]
    assert f"page: {summary['page']}" in told.err
    assert QUESTIONS[0] in told.err
