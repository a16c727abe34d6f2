"""Conversations as `--data` of train and align: files of each kind, which tokens are learned, and what is said."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

from logitless.errors import ConfigError, DataError
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.align.data import rows_of
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.data import load, prepare
from logitless.workbench.sources.packing import IGNORED
from logitless.workbench.sources.tokenizer import pretrained
from tests.support.workbench.micro import micro_directory

TEMPLATE = "{% for m in messages %}<s>{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<s>a:{% endif %}"
KEPT = "which a larger --context-length keeps"
ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}?"}, {"role": "assistant", "content": f"a{i}." + "!" * i}]}
    for i in range(24)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    place = micro_directory(tmp_path_factory.mktemp("chat")).parent
    saved = AutoTokenizer.from_pretrained(place)
    saved.chat_template = TEMPLATE
    saved.save_pretrained(place)
    return pretrained(str(place))


def jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TrainConfig(data=str(path), context_length=24)


def prepared(config, tokenizer, tmp_path):
    remarks = prepare(config, tokenizer, 259, tmp_path / "tokens.npz")
    return *load(tmp_path / "tokens.npz", config.context_length), remarks


def learned(rows, tokenizer) -> str:
    return "".join(tokenizer.saved.decode(row["labels"][row["labels"] != IGNORED]) for row in rows)


def answers(rows) -> str:
    return "".join(row["messages"][1]["content"] + "</s>" for row in rows)


def test_rows_without_text_are_counted(tokenizer, tmp_path):
    pq.write_table(pa.table({"text": ["a" * 99, None]}), tmp_path / "a.parquet")
    config = TrainConfig(data=str(tmp_path / "a.parquet"), context_length=24)
    told = f"{tmp_path}/a.parquet: 1 of 2 rows without text (null): left out"
    assert prepared(config, tokenizer, tmp_path)[2] == [told]
    pq.write_table(pa.table({"text": pa.array([None], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: no text in it; .*a.parquet: 1 of 1 row without text"):
        prepared(config, tokenizer, tmp_path)


def test_the_answers_alone_are_learned_and_some_held_out(tokenizer, tmp_path):
    """One of i answers has 16 + i tokens with its question, from i = 10 on: those from 13 on do not fit."""
    config = replace(jsonl(tmp_path / "chat.jsonl"), context_length=28)
    train, held, remarks = prepared(config, tokenizer, tmp_path)
    assert learned(held, tokenizer) == answers(ROWS[10:11])
    found = learned(train, tokenizer)
    assert all(answers([row]) in found for row in ROWS[:10] + ROWS[11:13])
    assert answers(ROWS[13:14]) not in found
    assert "q" not in found
    assert remarks == [f"11 of 23 conversations longer than 28 tokens: the last 66 tokens cut off, {KEPT}"]


def test_all_tokens_where_that_is_asked_for(tokenizer, tmp_path):
    config = replace(jsonl(tmp_path / "chat.jsonl", ROWS[:4]), loss_on="all")
    train, held, _ = prepared(config, tokenizer, tmp_path)
    assert learned(held, tokenizer) == "u:q3?</s><s>a:a3.!!!</s>"  # a first token has nothing before it
    assert "q0?" in learned(train, tokenizer)


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_tables_of_other_kinds(tokenizer, tmp_path, kind):
    config = jsonl(tmp_path / "chat.jsonl", ROWS[:6])
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS[:6]), tmp_path / "chat.parquet")
        other, expected = tmp_path / "chat.parquet", ROWS[5:6]
    else:
        parts = {"train": Dataset.from_list(ROWS[:6]), "validation": Dataset.from_list(ROWS[6:8])}
        DatasetDict(parts).save_to_disk(str(tmp_path / "table"))
        other, expected = tmp_path / "table", ROWS[6:8]
    _, held, _ = prepared(replace(config, data=str(other)), tokenizer, tmp_path)
    assert learned(held, tokenizer) == answers(expected)


def test_rows_of_text_stay_text(tokenizer, tmp_path):
    config = jsonl(tmp_path / "text.jsonl", [{"text": "abcdefgh" * 4, "messages": []}] * 8)
    train, _, remarks = prepared(config, tokenizer, tmp_path)
    assert set(learned(train, tokenizer).replace("</s>", "")) <= set("abcdefgh")
    assert remarks == []


def test_a_table_of_conversations_without_rows(tokenizer, tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS)[:0], tmp_path / "a.parquet")
    config = TrainConfig(data=str(tmp_path / "a.parquet"), context_length=24)
    with pytest.raises(DataError, match=rf"^--data {tmp_path}/a.parquet: no rows in it: expected conversations, one"):
        prepared(config, tokenizer, tmp_path)


def test_documents_of_single_tokens_are_too_short(tokenizer, tmp_path):
    silent = replace(tokenizer, encode=lambda texts: [[] for _ in texts])  # as one that splits at blanks has it
    said = "^--data .*: no token follows another in a training document: expected some of two tokens or more: give long"
    with pytest.raises(DataError, match=said):
        prepared(jsonl(tmp_path / "a.jsonl", [{"text": " "}] * 100), silent, tmp_path)


def test_what_cannot_be_learned_from(tokenizer, tmp_path):
    question = {"messages": [{"role": "user", "content": "q"}]}
    with pytest.raises(DataError, match=r"bad.jsonl: row 1: no message of the assistant"):
        prepared(jsonl(tmp_path / "bad.jsonl", [ROWS[0], question]), tokenizer, tmp_path)
    long = [{"messages": [{"role": "user", "content": "q" * 50}, *ROWS[0]["messages"][1:]]}] * 3
    told = f"no training conversation can be learned from: 2 of 2 .* {KEPT}; 2 of 2 conversations without an answer "
    with pytest.raises(DataError, match=told):
        prepared(jsonl(tmp_path / "long.jsonl", long), tokenizer, tmp_path)
    empty = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}] * 3
    mute = replace(tokenizer, saved=AutoTokenizer.from_pretrained(tokenizer.saved.name_or_path))
    mute.saved.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  # whose answers have no end
    with pytest.raises(DataError, match=r": 2 of 2 conversations without an answer in the first 24 tokens: left out$"):
        prepared(jsonl(tmp_path / "empty.jsonl", empty), mute, tmp_path)
    plain = pretrained(str(micro_directory(tmp_path / "plain").parent))
    with pytest.raises(ConfigError, match="conversations need a chat template"):
        prepared(jsonl(tmp_path / "chat.jsonl"), plain, tmp_path)


def test_a_template_that_forgets_names_the_option_that_train_has(tokenizer, tmp_path):
    forgets = AutoTokenizer.from_pretrained(tokenizer.saved.name_or_path)
    forgets.chat_template = "{% for m in messages %}{{ 'hm ' if loop.last }}{{ m['content'] }}{% endfor %}"
    config = jsonl(tmp_path / "chat.jsonl", [{"messages": 2 * row["messages"]} for row in ROWS])
    with pytest.raises(DataError, match=r"row 0: .*: give one answer in each conversation, or --loss-on all$"):
        prepare(config, replace(tokenizer, saved=forgets), 259, tmp_path / "tokens.npz")


def test_align_asks_what_was_asked(tokenizer, tmp_path):
    config = AlignConfig(method="grpo", data=jsonl(tmp_path / "chat.jsonl").data)
    train, held = rows_of(config, tokenizer, 8)
    assert held == [{"prompt": ROWS[10]["messages"][:1]}]
    assert train[0] == {"prompt": ROWS[0]["messages"][:1]}
    assert len(train) == 23
