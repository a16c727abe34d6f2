"""The Tekken vocabulary: as mistral-common encodes it, and as AutoTokenizer loads it beside a model."""

import json

import pytest
from transformers import AutoTokenizer

from logitless.errors import ConfigError
from logitless.models.presets import preset
from logitless.workbench.sources.corpus import standard_library
from logitless.workbench.sources.tokenizer import pretrained, tekken

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


def test_documents_end_where_they_end(tokenizer):
    found = list(tokenizer.documents(["one </s> two", "", "three"]))
    assert [ids[-1] for ids in found] == [2, 2]
    assert all((ids[:-1] != 2).all() for ids in found)


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="no usable tokenizer") as caught:
        pretrained(str(tmp_path))
    assert "\n" not in str(caught.value)
