"""Tokens as text: together what decoding gives, alone what can be read, and never anything that acts."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from logitless.printable import UNSAFE, shown
from logitless.sample.text import byte_count, name_of, pieces, raw_name, shown_alone
from tests.support.sample.texts import HARD, byte_tokenizer


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def by_words():
    """Words with their space in front, and bytes for whatever else, as sentencepiece's models have."""
    words = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁the", "▁", "cat", "▁cat"]
    bpe = models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("text", HARD.values(), ids=HARD)
def test_pieces_are_the_text(by_bytes, text):
    ids = by_bytes(text)["input_ids"]
    for before in ([], by_bytes("ends with a part: é")["input_ids"][:-1], by_bytes("word")["input_ids"]):
        found = pieces(by_bytes, before, ids)
        assert "".join(piece.text for piece in found).removeprefix("\ufffd") == text
        assert [piece.text for piece in found if piece.text] == list(text) or before


def test_a_character_comes_with_its_last_byte(by_bytes):
    ids = by_bytes("中x")["input_ids"]
    assert [piece.text for piece in pieces(by_bytes, [], ids)] == ["", "", "中", "x"]
    assert [piece.text for piece in pieces(by_bytes, [], ids[:2])] == ["", "\ufffd"]
    stray = [ids[1]] * 6
    assert [piece.text for piece in pieces(by_bytes, [], stray)] == ["", "", "", "\ufffd" * 4, "", "\ufffd" * 2]
    special = pieces(by_bytes, [], [ids[0], by_bytes.eos_token_id, ids[3]])
    assert [piece.special for piece in special] == [False, True, False]
    assert special[1].text.endswith("</s>")
    assert special[2].text == "x"


def test_spaces_that_decoding_strips(by_words):
    def ids(*words):
        return by_words.convert_tokens_to_ids(list(words))

    assert [p.text for p in pieces(by_words, ids("▁the"), ids("▁cat", "cat", "▁"))] == [" cat", "cat", " "]
    euro = ids("▁the", "<0xE2>", "<0x82>", "<0xAC>", "▁cat")
    assert [p.text for p in pieces(by_words, [], euro)] == ["the", "", "", "€", " cat"]
    assert [name_of(by_words, i) for i in euro] == ["␣the", "\\xe2", "\\x82", "\\xac", "␣cat"]
    assert raw_name(by_words, ids("<0x41>")[0]) == "A"
    assert name_of(by_words, ids("</s>")[0]) == "</s>"
    assert name_of(by_words, 10**6) == "<1000000>"


def test_names_of_bytes(by_bytes):
    names = [name_of(by_bytes, i) for i in by_bytes("é \ní")["input_ids"]]
    assert names == ["\\xc3", "\\xa9", "␣", "\\n", "\\xc3", "\\xad"]


def test_bytes_wherever_tokens_end(by_bytes, by_words):
    text = "é😀 日本"
    ids = by_bytes(text)["input_ids"]
    assert [byte_count(by_bytes, ids[:i]) for i in range(len(ids) + 1)] == list(range(len(text.encode()) + 1))
    assert byte_count(by_bytes, [ids[0], by_bytes.eos_token_id, ids[1]]) == 2  # what a document ends with is no text
    assert byte_count(by_bytes, []) == 0
    euro = by_words.convert_tokens_to_ids(["▁the", "<0xE2>", "<0x82>", "<0xAC>", "▁cat", "</s>"])
    assert [byte_count(by_words, euro[:i]) for i in range(7)] == [0, 3, 4, 5, 6, 10, 10]
    assert [byte_count(by_words, euro[1:i]) for i in range(1, 4)] == [0, 1, 2]


def test_nothing_acts():
    for text in HARD.values():
        assert not UNSAFE.search(shown(text))
        assert not set("\n\r\t") & set(shown_alone(text))
    assert shown("a\x1b[31m\u202e\n\t") == "a\\x1b[31m\\u202e\n\t"
    assert shown_alone("  a b\t ") == "␣␣a b\\t␣"
    assert [shown_alone(" " * n) for n in (4, 5, 7)] == ["␣␣␣␣", "␣×5", "␣×7"]
    assert shown("👩‍👩‍👧 مرحبا") == "👩‍👩‍👧 مرحبا"
