"""GGUF files: what a header says, transformers' model out of one, and one line for what is none or damaged."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from logitless.errors import ConfigError
from logitless.models.catalog import shape_of
from logitless.models.gguf import config_fields, convert, file_of, read_header
from logitless.models.pretrained import PACKAGES
from logitless.models.shapes import ModelShape
from tests.support.workbench.packed import SHAPE, TEMPLATE, cut, micro_gguf, micro_llama


@pytest.fixture
def file(tmp_path):
    return micro_gguf(tmp_path / "micro.gguf")


def test_a_header_says_what_the_model_is(file):
    header = read_header(file)
    assert header.architecture == "llama"
    assert header.values["tokenizer.chat_template"] == TEMPLATE
    assert "tokenizer.ggml.tokens" not in header.values
    assert header.shapes["token_embd.weight"] == (320, 32)
    assert header.shapes["blk.1.ffn_down.weight"] == (32, 64)
    assert {key: x for key, x in config_fields(file).items() if key in SHAPE} == SHAPE


def test_a_plan_takes_a_file_without_converting_it(file):
    shape = shape_of(str(file))
    assert isinstance(shape, ModelShape)
    assert shape.parameters == sum(p.numel() for p in micro_llama().parameters())


def test_a_converted_file_is_the_model_that_was_written(file, tmp_path):
    convert(file, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = micro_llama().state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("ab c")["input_ids"] == [*map(tokenizer.get_vocab().get, ["ab", "Ġ", "c"])]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<s>user\na</s>\n"


def test_names_that_lead_to_a_file(file, tmp_path):
    assert file_of(str(file)) == file
    assert file_of(f"{tmp_path}:micro.gguf") == file
    assert file_of(str(tmp_path)) == file
    assert all(file_of(name) is None for name in ("tiny", "owner/name", str(tmp_path / "none"), *PACKAGES))
    (tmp_path / "config.json").write_text("{}")
    assert file_of(str(tmp_path)) is None
    (tmp_path / "config.json").unlink()
    micro_gguf(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=rf"has 2 GGUF files; name one, as {tmp_path}:micro.gguf"):
        file_of(str(tmp_path))
    for name in (f"{tmp_path}:none.gguf", str(tmp_path / "none.gguf")):
        with pytest.raises(ConfigError, match="expected a GGUF file, there is none at"):
            file_of(name)


def put(path, at: int, what: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(what)] = what
    path.write_bytes(data)


DAMAGES = {
    "empty": (lambda path: cut(path, 0), "expected a GGUF file, which begins with GGUF"),
    "another kind of file": (lambda path: put(path, 0, b"PK\3\4"), "expected a GGUF file, which begins with GGUF"),
    "a version of the future": (lambda path: put(path, 4, b"\x09"), "expected GGUF version 2 or 3, got 9"),
    "cut within the header": (lambda path: cut(path, 200), "damaged or cut short"),
    "cut behind the magic": (lambda path: cut(path, 6), "damaged or cut short"),
    "a length without end": (lambda path: put(path, 24, b"\xff" * 8), "damaged or cut short"),
    "an unknown kind of value": (lambda path: put(path, 32 + len("general.architecture"), b"\x63"), "damaged or cut"),
    "cut within the weights": (lambda path: cut(path, 0.6), "damaged or cut short"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_file_is_one_line(file, what):
    damage, expected = DAMAGES[what]
    damage(file)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_end_early_are_found_when_they_are_read(file, tmp_path):
    cut(file, file.stat().st_size - 8)  # of the last tensor
    read_header(file)
    with pytest.raises(ConfigError, match="cannot be read, most likely damaged or cut short"):
        convert(file, tmp_path / "model")


def test_an_architecture_that_transformers_does_not_read(tmp_path):
    file = micro_gguf(tmp_path / "odd.gguf", "bert")
    with pytest.raises(ConfigError, match=r"odd.gguf: .*bert.* not supported"):
        convert(file, tmp_path / "model")
