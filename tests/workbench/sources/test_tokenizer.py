"""The Tekken vocabulary: as mistral-common encodes it, and as AutoTokenizer loads it beside a model."""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from logitless.errors import ConfigError, LogitlessError
from logitless.models.presets import preset
from logitless.workbench.sources.chat import example
from logitless.workbench.sources.corpus import standard_library
from logitless.workbench.sources.tokenizer import chat_ids, pretrained, prompt_ids, tekken
from tests.support.workbench.damage import JSON
from tests.support.workbench.micro import MICRO_CHAT, micro_directory

SAMPLES = (
    "def f(x):\n\treturn x ** 2  # größer, 数学, 🙂\n",
    "</s> and <s> are text here",
    "   \n\n\t 12345678 ",
    "[INST]",
)


@pytest.fixture(scope="module")
def tokenizer():
    return tekken()


@pytest.fixture(scope="module")
def loaded(tokenizer, tmp_path_factory):
    """As a user loads it: from a directory, beside a Qwen3 configuration."""
    place = tmp_path_factory.mktemp("saved")
    tokenizer.saved.save_pretrained(place)
    (place / "config.json").write_text(json.dumps(preset("tiny")))
    return AutoTokenizer.from_pretrained(place)


def test_every_id_is_in_the_vocabulary(tokenizer, loaded):
    assert tokenizer.size == len(loaded) == 131_072 == preset("tiny")["vocab_size"]
    assert max(loaded.get_vocab().values()) == 131_071
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 11)
    assert tokenizer.eos_id == loaded.eos_token_id


def test_the_saved_tokenizer_gives_the_same_ids(tokenizer, loaded):
    library = sorted(standard_library(), key=len)[100:400:50]
    texts = [*SAMPLES, *library]
    assert loaded(texts, add_special_tokens=False)["input_ids"] == tokenizer.encode(texts)
    assert [loaded.decode(ids) for ids in tokenizer.encode(list(SAMPLES))] == list(SAMPLES)


def test_a_word_without_an_id_is_one_line(tmp_path):
    """A vocabulary of words that lost its token for unknown ones."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = pretrained(str(tmp_path))
    assert tokenizer.encode(["a b a"]) == [[0, 1, 0]]
    with pytest.raises(ConfigError, match=rf"^the tokenizer at {tmp_path} cannot read this text: WordLevel error"):
        tokenizer.encode(["a c"])
    with pytest.raises(ConfigError, match=rf"^document 73, 'b c': the tokenizer at {tmp_path} cannot read this text: "):
        list(tokenizer.documents(["", "a b"] * 36 + ["b c", "c"]))
    with pytest.raises(ConfigError, match=rf"^--data here: the tokenizer at {tmp_path} cannot read this text: "):
        example({"prompt": "a", "completion": "c"}, tokenizer, "here")
    tokenizer.saved.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match=rf"^the tokenizer at {tmp_path} cannot read this text: WordLevel error"):
        chat_ids([{"role": "user", "content": "c"}], tokenizer.saved)


def test_documents_end_where_they_end(tokenizer):
    found = list(tokenizer.documents(["one </s> two", "", "three"]))
    assert [ids[-1] for ids in found] == [2, 2]
    assert all((ids[:-1] != 2).all() for ids in found)


def test_prompts_begin_as_documents_and_conversations_do(tmp_path):
    """Text has its opening, nothing behind it and no markers in it; a conversation's markers are whole tokens."""
    micro_directory(tmp_path, "<s> $A </s>")
    tokenizer = pretrained(str(tmp_path))
    assert tokenizer.saved("<s>")["input_ids"] == [1, 1, 2]
    (ids,) = prompt_ids(["<s>"], tokenizer)
    (document,) = tokenizer.documents(["<s>"])
    assert ids == document[:-1].tolist() == [1, *tokenizer.encode(["<s>"])[0]]
    assert len(ids) == 1 + len("<s>")
    tokenizer.saved.chat_template = MICRO_CHAT
    (ids,) = prompt_ids([[{"role": "user", "content": "a"}]], tokenizer)
    assert [i for i, token in enumerate(ids) if token in (1, 2)] == [0, len("user:a") + 1, len("user:a") + 2]
    assert tokenizer.saved.decode(ids) == "<s>user:a</s><s>assistant:"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", [kind for kind in JSON if kind not in ("a pipe", "a folder")])
def test_files_in_whose_place_anything_lies(tmp_path, kind, name):
    """Refused in one line; transformers takes a tokenizer_config.json of null for none."""
    micro_directory(tmp_path)
    JSON[kind](tmp_path / name)
    with pytest.raises(ConfigError, match=f"tokenizer at {tmp_path}") as caught:
        pretrained(str(tmp_path))
    assert "\n" not in str(caught.value)


def _places(content: Any, at: tuple = ()) -> Iterator[tuple]:
    """Where values stand in JSON; the first ones of long lists and tables."""
    inner = list(
        content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    )
    for name, value in inner[:30]:
        yield (*at, name)
        yield from _places(value, (*at, name))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_values_of_other_kinds(tmp_path, name):
    """A tokenizer that encodes, decodes and is saved, or one line."""
    micro_directory(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))
    text, draw = (tmp_path / name).read_text(), Random(0)
    places, values = list(_places(json.loads(text))), [None, True, -1, 10**30, 1.5, "x", "", [], {}, [1], {"a": 1}]
    cases = [*((place, draw.choice(values)) for place in draw.choices(places, k=80))]
    for place, value in [*cases, *((place, {}) for place in places if name == "tokenizer_config.json")]:
        content = json.loads(text)
        *above, last = place
        reduce(getitem, above, content)[last] = value
        (tmp_path / name).write_text(json.dumps(content))
        with suppress(LogitlessError):
            tokenizer = pretrained(str(tmp_path))
            list(tokenizer.documents(["abc"]))
            tokenizer.saved.save_pretrained(tmp_path / "again")


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="no usable tokenizer") as caught:
        pretrained(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_added_tokens_that_are_not_special_are_entries_for_text(tmp_path):
    """As of letters or bases, which tokenizers without a model of subwords are made of."""
    made = Tokenizer(models.BPE())
    made.add_special_tokens(["</s>"])
    made.add_tokens(["A", "C", "G", "T"])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
    assert pretrained(str(tmp_path)).encode(["GA"]) == [[3, 1]]


@pytest.mark.parametrize("kind", ["qwen3", "gemma"])
def test_a_model_without_its_tokenizer(tmp_path, kind):
    """transformers makes one of special tokens: Qwen's has no token for a text, Gemma's one unknown for all of it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ConfigError, match=rf"^no tokenizer at {tmp_path}: expected .* got special tokens alone; put"):
        pretrained(str(tmp_path))
