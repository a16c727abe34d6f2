"""Conversations: the assistant's tokens have scores, each behind all that was said before it."""

import json
import math
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from logitless.errors import ConfigError, DataError
from logitless.workbench.scoring.run import run
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.teacher import Teacher
from logitless.workbench.sources.chat import ASSISTANT, example
from logitless.workbench.sources.tokenizer import pretrained
from tests.support.workbench.damage import MESSAGES
from tests.support.workbench.micro import MICRO_CHAT
from tests.workbench.scoring.conftest import config

CONTEXT = 24


def said(*texts: str) -> list[dict]:
    """Messages of a user and the assistant in turn."""
    return [{"role": ("user", ASSISTANT)[i % 2], "content": text} for i, text in enumerate(texts)]


ROWS = [
    {"messages": said("ab", "cd", "a longer question", "and an answer that takes two windows or three")},
    {"messages": said("no answer")},
    {"messages": said("e", "f")},
]


@pytest.fixture(scope="module")
def talker(micro, tmp_path_factory):
    """The micro model with a chat template."""
    place = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(micro, place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.chat_template = MICRO_CHAT
    tokenizer.save_pretrained(place)
    return place


def written(path, kind: str):
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        Dataset.from_list(ROWS).save_to_disk(path)
    return path


def test_a_template_that_forgets_is_answered_by_no_option_of_another_command(talker, tmp_path):
    shutil.copytree(talker, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(talker)
    tokenizer.chat_template = "{% for m in messages %}{{ 'hm ' if loop.last }}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    data = written(tmp_path / "a.jsonl", "jsonl")
    with pytest.raises(DataError, match=r"cannot be told apart: give one answer in each conversation$"):
        run(config(tmp_path / "model", data, tmp_path / "out.parquet"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "directory"])
def test_answers_are_scored_behind_all_before_them(talker, tmp_path, kind):
    data, out = written(tmp_path / f"a.{kind}", kind), tmp_path / "out.parquet"
    options = {"documents": tmp_path / "lines.jsonl", "context_length": CONTEXT, "stride": 8}
    summary = run(config(talker, data, out, **options))
    assert [(x["document"], x["why"]) for x in summary["skipped_documents"]] == [
        (1, "no message of the assistant, whose tokens would count")
    ]
    assert "-0.0" not in (tmp_path / "lines.jsonl").read_text()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(talker).eval(), pretrained(str(talker))
    rows, nats, count, size = pq.read_table(out).to_pylist(), 0.0, 0, 0
    for document in (0, 2):
        here = [row for row in rows if row["document"] == document]
        expected = example(ROWS[document], tokenizer, "")
        assert [row["token"] for row in here] == expected.ids.tolist()
        assert [row["logprob"] is not None for row in here] == expected.said.tolist()
        for at in np.flatnonzero(expected.said):
            seen = here[at]["context"]
            assert seen == at if at <= CONTEXT else CONTEXT - 8 < seen <= CONTEXT
            with torch.no_grad():
                z = model(torch.tensor([expected.ids[at - seen : at].tolist()])).logits[0, -1]
            logprob = float(z.log_softmax(-1)[here[at]["token"]])
            assert here[at]["logprob"] == pytest.approx(logprob, abs=2e-5)
            nats, count = nats - logprob, count + 1
        size += len(tokenizer.saved.decode(expected.ids[expected.said].tolist(), skip_special_tokens=True).encode())
    assert (summary["scored_tokens"], summary["bytes"]) == (count, size)
    assert summary["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)


def test_messages_of_no_text_are_passed_over(talker, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": [message, *said("a", "b")]}) + "\n" for message, _ in MESSAGES.values())
    )
    with pytest.raises(DataError, match=r"no token to score in 12 documents; .*message 0: content must be text, got"):
        run(config(talker, tmp_path / "a.jsonl", tmp_path / "out.parquet"))


def test_conversations_that_the_template_refuses_are_passed_over(talker, tmp_path):
    shutil.copytree(talker, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(talker)
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refuses + MICRO_CHAT
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"messages": said("a", "b")}, {"messages": [{"role": "system", "content": "x"}, *said("a", "b")]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run(config(tmp_path / "model", tmp_path / "a.jsonl", tmp_path / "out.parquet"))
    assert summary["scored_tokens"] > 0
    assert [x["why"] for x in summary["skipped_documents"]] == ["the chat template failed: no system"]


def test_a_prompt_and_a_completion(talker, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "ab", "completion": "cde"}) + "\n")
    assert run(config(talker, tmp_path / "a.jsonl", tmp_path / "out.parquet"))["scored_tokens"] == 4  # and the end


def test_a_tokenizer_without_a_template_is_one_line(micro, tmp_path):
    with pytest.raises(ConfigError, match="conversations need a chat template"):
        run(config(micro, written(tmp_path / "a.jsonl", "jsonl"), tmp_path / "out.parquet"))


def test_a_record_of_answers_teaches_nobody(talker, tmp_path):
    out = tmp_path / "out.parquet"
    run(config(talker, written(tmp_path / "a.jsonl", "jsonl"), out))
    teacher = Teacher.of(TrainConfig(model=str(talker), teacher=str(out)), pretrained(str(talker)), 259)
    assert teacher is not None
    with pytest.raises(DataError, match="2 of 2 documents with tokens that have no score, as conv"):
        teacher.streams(16)
