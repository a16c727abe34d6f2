"""A model, a tokenizer and a corpus small enough for whole runs in a test."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 32
SHAPE = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

MICRO_CHAT = (
    "{% for message in messages %}<s>{{ message.role }}:{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def micro_model(**changes: object) -> Qwen3ForCausalLM:
    """A two-layer Qwen3 with random weights; the same for the same torch seed."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **changes}))


def micro_directory(place: Path, around: str | None = None, **changes: object) -> Path:
    """config.json and a byte-level tokenizer, as transformers would have saved them; returns config.json.

    around: as "<s> $A </s>", what the tokenizer puts around a text; as published ones do, it then reads markers in it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [(token, i) for i, token in enumerate(["<pad>", "<s>", "</s>"])]
    vocabulary = {**dict(special), **{token: i for i, token in enumerate(alphabet, len(special))}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if around is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, split_special_tokens=around is None, **names)
    fast.save_pretrained(place)
    config = place / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3", **SHAPE, **changes}))
    return config


def micro_corpus(place: Path, documents: int = 60) -> Path:
    """A folder of small text files, each with its own letters, so that there is something to learn."""
    place.mkdir(parents=True)
    for i in range(documents):
        words = f"file {i}: " + " ".join("abcdefgh"[(i * k) % 8] * 3 for k in range(1, 5 + i % 11))
        (place / f"{i:03d}.txt").write_text(words + "\n")
    return place


def line_corpus(place: Path, documents: int = 60, lines: int = 24) -> Path:
    """A folder of text files of many short lines, as prompts are cut from; each line names its document."""
    place.mkdir(parents=True)
    for i in range(documents):
        text = "".join(f"d{i:02d} x{k % 7} = {k}\n" for k in range(lines))
        (place / f"{i:03d}.txt").write_text(text)
    return place
