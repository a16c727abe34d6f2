"""Model shapes by name, as plain dictionaries of transformers' own configuration fields (no torch import)."""

from __future__ import annotations

from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .pretrained import PACKAGES

TEKKEN_VOCAB = 131_072
QWEN3_VOCAB = 151_936


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": QWEN3_VOCAB,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
        **other,
    }


def _llama(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **other,
    }


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Small enough to train on a laptop's processor; their vocabulary is the Tekken tokenizer's.
    "tiny": _qwen3(256, 4, 4, 2, 768, head_dim=64, vocab_size=TEKKEN_VOCAB, max_position_embeddings=4096),
    "small": _qwen3(384, 6, 6, 2, 1152, head_dim=64, vocab_size=TEKKEN_VOCAB, max_position_embeddings=8192),
    # Published shapes, to train from scratch or to plan with.
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12_288, tie_word_embeddings=False),
    "smollm2-135m": _llama(
        49_152,
        576,
        30,
        9,
        3,
        1536,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    ),
    "llama-3.2-1b": _llama(
        128_256, 2048, 16, 32, 8, 8192, max_position_embeddings=131_072, rope_parameters=_LLAMA3_ROPE
    ),
    "llama-3.2-3b": _llama(
        128_256, 3072, 28, 24, 8, 8192, max_position_embeddings=131_072, rope_parameters=_LLAMA3_ROPE
    ),
}


def check_known(name: str) -> None:
    """ConfigError where the name of a known model is also that of a model's directory here: either may be meant."""
    if (Path(name) / "config.json").is_file():
        raise ConfigError(f"model {name}: a known model and a directory here have this name; ./{name} is the directory")


def preset(name: str) -> dict[str, Any]:
    """The configuration fields of a preset, a copy to change at will; ConfigError names the nearest presets."""
    if name not in PRESETS:
        near = get_close_matches(name.lower(), [*PRESETS, *PACKAGES], n=2, cutoff=0.5)
        known = f"presets are {', '.join(PRESETS)}; with weights: {', '.join(PACKAGES)};"
        hint = f"did you mean {' or '.join(near)}?" if near else known
        raise ConfigError(
            f"unknown model {name!r}: {hint} otherwise give a config.json, a local directory, a GGUF file or a hub id "
            "(owner/name)"
        )
    return deepcopy(PRESETS[name])
