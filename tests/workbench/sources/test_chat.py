"""Conversations as training rows: which tokens the loss is of, under templates of each kind; how rows are filled."""

import json
import time
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from logitless.errors import ConfigError, DataError
from logitless.workbench.sources.chat import Example, example, hold_out, packed, prompt_of
from logitless.workbench.sources.corpus import is_chat, table
from logitless.workbench.sources.packing import IGNORED, PackedRows
from logitless.workbench.sources.tokenizer import TextTokenizer
from tests.support.workbench.damage import CALLS, DEEP, MARK, MESSAGES, TEMPLATES
from tests.support.workbench.micro import micro_directory

PLAIN = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
MARKED = """{% for m in messages %}<s>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}
{% else %}{{ m['content'] }}</s>
{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
# As Qwen3's: what the assistant thought is written for its last answer only.
FORGETS = "{% for m in messages %}<s>{{ m['role'] }}\n{{ 'hm ' if loop.last }}{{ m['content'] }}</s>\n{% endfor %}"
ASKED = {"role": "user", "content": "who?"}
SAID = {"role": "assistant", "content": "me."}
NESTED = reduce(lambda inner, _: [inner], range(2000), [])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return micro_directory(tmp_path_factory.mktemp("tokenizer")).parent


def tokenizer(place, template=PLAIN) -> TextTokenizer:
    saved = AutoTokenizer.from_pretrained(place)
    saved.chat_template = template

    def encode(texts):
        return saved(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    return TextTokenizer(encode, saved, 259, saved.eos_token_id)


def learned(found: Example, place) -> str:
    return tokenizer(place).saved.decode(found.ids[found.said].astype(int))


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_only_what_the_assistant_says_is_learned(place, template):
    given = {"messages": [{"role": "system", "content": "be brief"}, ASKED, SAID, ASKED, {**SAID, "content": "you."}]}
    found = example(given, tokenizer(place, template), "here")
    assert learned(found, place) == "me.</s>you.</s>"
    whole = tokenizer(place).saved.decode(found.ids.astype(int))
    assert whole.startswith("<s>system\nbe brief</s>\n<s>user\nwho?</s>\n<s>assistant\nme.</s>")
    every = example(given, tokenizer(place, template), "here", every=True)
    assert every.said.all()
    quoting = example({"messages": [ASKED, {**SAID, "content": "</s> ends."}]}, tokenizer(place, template), "here")
    assert learned(quoting, place) == "</s> ends.</s>"  # up to the last end of text, not the first
    assert (every.ids == found.ids).all()


def test_an_answer_may_quote_an_end_of_text_that_does_not_end_it(place):
    """As where a template ends turns by a marker of its own; what it writes behind the tokenizer's is not learned."""
    given = {"messages": [ASKED, {**SAID, "content": " </s> ends. "}, ASKED, {**SAID, "content": "s"}]}
    other = PLAIN.replace("</s>", "<end>").replace("m['content']", "m['content'] | trim")
    assert learned(example(given, tokenizer(place, other), "here"), place) == "</s> ends.<end>\ns<end>\n"
    assert learned(example(given, tokenizer(place), "here"), place) == " </s> ends. </s>s</s>"
    shouted = PLAIN.replace("m['content']", "m['content'] | upper")  # where it stands is not known
    long = {"messages": [ASKED, {**SAID, "content": "me, " * 30}]}
    assert learned(example(long, tokenizer(place, shouted), "here"), place) == "ME, " * 30 + "</s>"


def test_marks_are_what_transformers_makes_of_them(place):
    messages = [{"role": "system", "content": "be brief", "name": None}, ASKED, SAID, ASKED, {**SAID, "content": "äh."}]
    found, saved = example({"messages": messages}, tokenizer(place, MARKED), "here"), tokenizer(place, MARKED).saved
    theirs = saved.apply_chat_template(
        messages,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"split_special_tokens": False},
    )
    assert found.ids.tolist() == theirs["input_ids"]
    assert found.said.tolist() == [bool(x) for x in theirs["assistant_masks"]]


@pytest.mark.parametrize("begin", ["", MARK], ids=["plain", "marked"])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_that_fail_or_never_end(place, kind, begin, monkeypatch):
    template, said = TEMPLATES[kind]
    if said == "did not end in":
        monkeypatch.setattr("logitless.workbench.sources.tokenizer.MOST_SECONDS", 0.3)
    began = time.perf_counter()
    with pytest.raises(ConfigError, match="the chat template failed") as caught:
        example({"messages": [ASKED, SAID]}, tokenizer(place, begin + template), "here")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - began < 30  # and not for ever


@pytest.mark.parametrize(
    "given", [lambda deep: {"tools": [{"x": deep}]}, lambda deep: {"messages": [{**ASKED, "x": deep}, SAID]}]
)
def test_what_is_nested_too_deeply_is_one_line(place, given):
    """JSON of such a depth is read, and fails where what it is read into is written."""
    with pytest.raises(ConfigError, match="--data here: the chat template failed: maximum recursion depth exceeded"):
        example({"messages": [ASKED, SAID], **given(NESTED)}, tokenizer(place), "here")


FORMS = {
    "text": ({"prompt": "1 + 1 =", "completion": " 2"}, "1 + 1 = 2</s>", " 2</s>"),
    "messages": ({"prompt": [ASKED], "completion": [SAID]}, None, "me.</s>"),
    "a text answer": ({"prompt": [ASKED], "completion": "me."}, None, "me.</s>"),
    "a text question": ({"prompt": "who?", "completion": [SAID]}, None, "me.</s>"),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompt_and_completion(place, form):
    row, whole, said = FORMS[form]
    found = example(row, tokenizer(place), "here")
    assert learned(found, place) == said
    assert tokenizer(place).saved.decode(found.ids.astype(int)) == (
        whole or "<s>user\nwho?</s>\n<s>assistant\nme.</s>\n"
    )


BAD = {
    "no answer": ({"messages": [ASKED]}, "here: no message of the assistant"),
    "no list": ({"messages": "who?"}, "here: messages: expected messages in a list, got str"),
    "no role": ({"messages": [{"content": "who?"}]}, "here: messages: message 0: role must be text, got none"),
    "a number": ({"prompt": 1, "completion": "x"}, "here: prompt: expected text, or messages in a list, got int"),
    "half": ({"prompt": "x"}, "here: expected messages"),
}


@pytest.mark.parametrize("what", BAD)
def test_rows_of_no_known_form(place, what):
    row, expected = BAD[what]
    with pytest.raises(DataError, match=expected):
        example(row, tokenizer(place), "here")


@pytest.mark.parametrize("what", MESSAGES)
def test_messages_of_no_text_are_named(place, what):
    """Templates would write them as Python prints them."""
    message, said = MESSAGES[what]
    for row in ({"messages": [ASKED, message, SAID]}, {"prompt": [ASKED, message], "completion": [SAID]}):
        with pytest.raises(DataError, match=rf"here: {next(iter(row))}: message 1: {said}"):
            example(row, tokenizer(place), "here")


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_a_tool_needs_no_content(place, call):
    answer = {"role": "tool", "content": "3", "tool_call_id": "1"}
    found = example({"messages": [ASKED, call, answer, SAID]}, tokenizer(place), "here")
    assert learned(found, place) == "</s>me.</s>"


TOOLS = [{"type": "function", "function": {"name": "count"}}]


@pytest.mark.parametrize("form", [TOOLS, json.dumps(TOOLS)], ids=["objects", "JSON"])
@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_tools_are_what_the_template_makes_of_them(place, template, form):
    with_tools = tokenizer(place, "{% for t in tools or () %}<s>{{ t['function']['name'] }}</s>{% endfor %}" + template)
    given = {"messages": [ASKED, SAID, ASKED, SAID]}
    found, bare = (example(row, with_tools, "here") for row in ({**given, "tools": form}, given))
    theirs = with_tools.saved.apply_chat_template(given["messages"], tools=TOOLS, tokenize=False)
    assert tokenizer(place).saved.decode(found.ids.astype(int)) == theirs
    assert theirs.startswith("<s>count</s>")
    assert learned(found, place) == learned(bare, place) == "me.</s>me.</s>"


def test_tools_of_parquet_have_their_own_parameters_alone(place, tmp_path):
    given = [[{"name": name, "parameters": {of: {"type": "string"}}}] for name, of in (("f", "x"), ("g", "y"))]
    rows = [{"messages": [ASKED, SAID], "tools": tools} for tools in given]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with_tools = tokenizer(place, "{{ tools | tojson }}" + PLAIN)
    read, _ = table(str(tmp_path / "rows.parquet"))
    for row, tools in zip(read, given, strict=True):
        text = tokenizer(place).saved.decode(example(row, with_tools, "here").ids.astype(int))
        assert json.loads(text[: text.index("<s>")]) == tools


@pytest.mark.parametrize("none", [None, [], "", "[]", "null"])
def test_no_tools_are_none(place, none):
    template = "{{ 'tools!' if tools is not none }}" + PLAIN
    found = example({"messages": [ASKED, SAID], "tools": none}, tokenizer(place, template), "here")
    assert learned(found, place) == "me.</s>"
    assert "tools" not in tokenizer(place).saved.decode(found.ids.astype(int))


@pytest.mark.parametrize("other", ["count", {"name": "count"}, ["count"], "{", 3, "[" * DEEP, NESTED])
def test_tools_of_no_known_form(place, other):
    with pytest.raises(DataError, match=r"^--data here: tools: expected a list of objects, or JSON of one, got "):
        example({"messages": [ASKED, SAID], "tools": other}, tokenizer(place), "here")


@pytest.mark.parametrize("said", ["me.", "ah", "bah", ""])
def test_an_answer_that_comes_first_is_all_that_is_learned(place, said):
    """Not the system prompt that the template puts in front, nor the answer's own header."""
    template = "{% if messages[0]['role'] != 'system' %}<s>system\nbe kind</s>\n{% endif %}" + PLAIN
    given = {"messages": [{**SAID, "content": said}, ASKED, SAID]}
    found = example(given, tokenizer(place, template), "here")
    assert learned(found, place) == f"{said}</s>me.</s>"


def test_a_template_that_refuses_a_conversation_says_which(place):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    with pytest.raises(ConfigError, match=r"^--data a.jsonl:7: the chat template failed: no system$"):
        example({"messages": [{**ASKED, "role": "system"}, SAID]}, tokenizer(place, template), "a.jsonl:7")


def test_a_template_that_rewrites_what_was_said(place):
    twice = {"messages": [ASKED, SAID, ASKED, SAID]}
    with pytest.raises(DataError, match=r"writes earlier messages anew .*: give one answer in each conversation$"):
        example(twice, tokenizer(place, FORGETS), "here")
    assert example(twice, tokenizer(place, FORGETS), "here", every=True).said.all()


def test_no_template(place):
    with pytest.raises(ConfigError, match="conversations need a chat template, and the tokenizer has none"):
        example({"messages": [ASKED, SAID]}, tokenizer(place, None), "here")


def made(*lengths: int) -> list[Example]:
    """Conversations of these lengths, the second half of each said, with ids that name them."""
    return [Example(np.full(n, i + 10, np.uint32), np.arange(n) >= n // 2) for i, n in enumerate(lengths)]


def test_rows_hold_whole_conversations_and_fillers_teach_nothing():
    stream, remarks = packed(made(5, 6, 3, 2), 8, filler=2)
    rows = PackedRows(stream, 8)
    assert [row["input_ids"].tolist() for row in rows] == [[10] * 5 + [12] * 3, [11] * 6 + [13] * 2]
    assert rows[0]["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert rows[0]["labels"].tolist() == [IGNORED, IGNORED, 10, 10, 10, IGNORED, 12, 12]
    assert remarks == []
    (row,) = PackedRows(packed(made(5), 8, filler=2)[0], 8)
    assert row["input_ids"].tolist() == [10] * 5 + [2] * 3
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert row["labels"].tolist() == [IGNORED, IGNORED, 10, 10, 10, IGNORED, IGNORED, IGNORED]


def test_what_does_not_fit_is_cut_and_counted():
    stream, remarks = packed(made(11, 20, 4), 8, filler=2)
    assert remarks == [
        "2 of 3 conversations longer than 8 tokens: the last 15 tokens cut off, which a larger --context-length keeps",
        "1 of 3 conversations without an answer in the first 8 tokens: left out",
    ]
    rows = PackedRows(stream, 8)
    assert rows[0]["input_ids"].tolist() == [10] * 8
    assert len(rows) == 2
    first = Example(np.array([5, 6], np.uint32), np.array([True, False]))  # which nothing comes before
    assert packed([first], 8, filler=2)[1] == ["1 of 1 conversation without an answer in the first 8 tokens: left out"]


def test_held_out_conversations_are_whole_and_apart():
    train, held = hold_out(made(*[4] * 50))
    assert [x.ids[0] for x in held] == [20, 40]
    assert len(train) == 48
    train, held = hold_out(made(4, 4, 4))
    assert (len(train), held[0].ids[0]) == (2, 12)
    with pytest.raises(DataError, match="expected two conversations or more"):
        hold_out(made(4))


def test_what_is_a_conversation():
    assert is_chat(["messages"])
    assert is_chat({"prompt": "", "completion": "", "id": 1})
    assert not any(map(is_chat, (["text"], ["text", "messages"], ["prompt"], ["prompt", "chosen", "rejected"], [])))
    assert prompt_of({"messages": [ASKED, SAID]}) == {"prompt": [ASKED]}
    assert prompt_of({"messages": [ASKED], "answer": 4}) == {"prompt": [ASKED], "answer": 4}
    assert prompt_of({"prompt": "x", "messages": []}) == {"prompt": "x", "messages": []}
