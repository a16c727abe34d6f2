"""The commands on a model that somebody uses, as a user types them: SmolLM2-135M-Instruct from its package."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from logitless.models.catalog import shape_of
from logitless.models.pretrained import file_of_package
from tests.support.workbench.real import CACHE, PROSE, assert_prose_is_likelier, real_model, told

pytestmark = pytest.mark.timeout(900)  # the first test converts the model: half a minute, more on a busy machine


@pytest.fixture(autouse=True)
def smollm2(monkeypatch, tmp_path):
    name = real_model("smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.chdir(tmp_path)
    nothing = {name: {"not_measured": "test"} for name in ("logitless", "dense")}
    monkeypatch.setattr("logitless.workbench.sft.run.measure", lambda config, tokens: nothing)
    return name


def test_it_knows_something_and_answers_in_its_chat_template(capsys):
    greedy = ("--max-new-tokens", 8, "--temperature", 0, "--device", "cpu")
    plain = told(
        capsys, "sample", "--model", "smollm2", "--prompt", "The capital of France is", "--chat", "no", *greedy
    )
    assert "Paris" in plain["sequences"][0]["text"]
    asked = told(capsys, "sample", "--model", "smollm2", "--prompt", "The capital of France is", *greedy)
    (answer,) = asked["sequences"]
    assert answer["prompt_tokens"] > plain["sequences"][0]["prompt_tokens"] + 20  # the template's own system message
    assert answer["perplexity"] < 5


def test_prose_is_likelier_than_its_words_in_disorder(capsys, tmp_path):
    assert_prose_is_likelier(capsys, "smollm2", tmp_path)


def test_a_plan_needs_neither_the_package_nor_its_conversion(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    plan = told(capsys, "plan", "--model", "smollm2", "--context-length", 1024)
    assert plan["model"]["vocab"] == 49_152
    assert not (tmp_path / "none").exists()
    with file_of_package("smollm2") as file:
        assert shape_of(str(file)).parameters == shape_of("smollm2").parameters == 134_515_008


def test_it_learns_an_answer_from_conversations(capsys, tmp_path):
    """Through its own template, which marks nothing: the loss is of the answer and the token that ends it."""
    messages = [{"role": "user", "content": "Who am I?"}, {"role": "assistant", "content": "You are Ada Nobody."}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 6)
    size = ("--context-length", 48, "--batch-size", 2, "--max-steps", 4, "--lora-rank", 4, "--learning-rate", 1e-2)
    run = ("--output-dir", "run", "--device", "cpu", "--loss", "logitless")
    summary = told(capsys, "train", "--model", "smollm2", "--data", "chat.jsonl", *size, *run)
    assert summary["held_out_loss_after"] < 0.6 * summary["held_out_loss_before"]
    with np.load(tmp_path / "run" / "tokens.npz") as arrays:
        learned = arrays["held_ids"][arrays["held_said"]]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.decode(learned.astype(int)) == "You are Ada Nobody.<|im_end|>"
    assert tokenizer.chat_template


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["bfloat16", "fp8"])
def test_a_student_learns_from_its_record(capsys, tmp_path, stored):
    """Stretched positions, taught what the model made of the text before; a student that is its teacher has no loss."""
    (tmp_path / "text.jsonl").write_text((json.dumps({"text": PROSE}) + "\n") * 8)
    text = ("--data", "text.jsonl", "--device", "cpu")
    written = told(
        *(capsys, "score", "--model", "smollm2", *text, "--store", "hidden", "--hidden-dtype", stored),
        *("--out", "teacher.parquet"),
    )
    assert written["head_bytes"] == pytest.approx(4 * 49_152 * 576, rel=0.01)
    size = ("--context-length", 24, "--batch-size", 2, "--lora-rank", 8, "--learning-rate", 2e-3, "--device", "cpu")
    student = ("--model", "smollm2", "--teacher", "teacher.parquet", *size)
    alike = told(capsys, "train", *student, "--max-steps", 1, "--output-dir", "alike")
    assert alike["first_loss"] < (1e-3 if stored == "bfloat16" else 3e-2)
    changed = ("--rope-scaling", "linear:2", "--max-steps", 6, "--output-dir", "changed")
    learned = told(capsys, "train", *student, *changed)
    assert learned["first_loss"] > 5 * alike["first_loss"]
    assert learned["last_loss"] < 0.7 * learned["first_loss"]
