"""From a name or a configuration to a model's shape: families, published sizes, config.json (no torch import)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import ConfigError, in_one_line
from ..units import LARGEST
from .gguf.header import check_numbers, config_fields, file_of, read_header
from .positions import plain, reached
from .presets import PRESETS, check_known
from .shapes import ModelShape

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Family:
    """What a model_type decides without a field in its configuration."""

    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2  # RMSNorms a layer, each of the hidden size
    fp32_norm: bool = False  # the norm's weight multiplies in fp32, before the cast
    rotary_by_layer: bool = False  # an older `rope_scaling` is of the layers that attend to all tokens alone
    experts: tuple[str, ...] = ()  # names of their number, the first one counts; (): it has none, even if named
    window_every: int = 0  # every n-th layer attends to all tokens, the others to a window; 0: see `window`
    defaults: dict[str, Any] = field(default_factory=dict)  # fields that published configurations leave out


_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096, "num_key_value_heads": 4}
_GEMMA3 = {
    **_GEMMA,
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}
_QWEN2_MOE = {
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3_MOE = {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_CAPPED = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, defaults={"num_key_value_heads": 32}),
    "qwen3": Family(qk_norm=True, defaults={"head_dim": 128, "num_key_value_heads": 32}),
    "gemma": Family(fp32_norm=True, defaults={"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16}),
    "gemma2": Family(norms=4, fp32_norm=True, window_every=2, defaults={**_GEMMA, **_CAPPED}),
    "gemma3_text": Family(
        qk_norm=True, norms=4, fp32_norm=True, rotary_by_layer=True, window_every=6, defaults=_GEMMA3
    ),
    "mixtral": Family(
        experts=("num_experts", "num_local_experts"),
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": Family(qkv_bias=True, experts=("num_experts",), defaults=_QWEN2_MOE),
    "qwen3_moe": Family(qk_norm=True, experts=("num_local_experts", "num_experts"), defaults=_QWEN3_MOE),
    "smollm3": Family(defaults={"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "granite": Family(),
}

# Published shapes beside those that `logitless train` offers, one row each:
# family, vocabulary, hidden, layers, heads, kv heads, head width, MLP width, tied, window, positions
_ROWS: dict[str, tuple[str, int, int, int, int, int, int, int, bool, int, int]] = {
    "qwen2.5-0.5b": ("qwen2", 151_936, 896, 24, 14, 2, 64, 4864, True, 0, 32_768),
    "qwen2.5-1.5b": ("qwen2", 151_936, 1536, 28, 12, 2, 128, 8960, True, 0, 32_768),
    "qwen2.5-3b": ("qwen2", 151_936, 2048, 36, 16, 2, 128, 11_008, True, 0, 32_768),
    "qwen2.5-7b": ("qwen2", 152_064, 3584, 28, 28, 4, 128, 18_944, False, 0, 32_768),
    "llama-3-8b": ("llama", 128_256, 4096, 32, 32, 8, 128, 14_336, False, 0, 8192),
    "llama-3.1-8b": ("llama", 128_256, 4096, 32, 32, 8, 128, 14_336, False, 0, 131_072),
    "gemma-2-2b": ("gemma2", 256_000, 2304, 26, 8, 4, 256, 9216, True, 4096, 8192),
    "gemma-2-9b": ("gemma2", 256_000, 3584, 42, 16, 8, 256, 14_336, True, 4096, 8192),
    "gemma-3-270m": ("gemma3_text", 262_144, 640, 18, 4, 1, 256, 2048, True, 512, 32_768),
    "gemma-3-1b": ("gemma3_text", 262_144, 1152, 26, 4, 1, 256, 6912, True, 512, 32_768),
    "gemma-3-4b": ("gemma3_text", 262_208, 2560, 34, 8, 4, 256, 10_240, True, 1024, 131_072),
    "mistral-7b": ("mistral", 32_768, 4096, 32, 32, 8, 128, 14_336, False, 0, 32_768),
}
_ROW_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
    "sliding_window",
    "max_position_embeddings",
)

CONFIGS: dict[str, dict[str, Any]] = {
    **PRESETS,
    **{name: dict(zip(_ROW_FIELDS, row, strict=True)) for name, row in _ROWS.items()},
}
HUB = {  # where weights of a published shape are
    **{f"qwen3-{size}": f"Qwen/Qwen3-{size.upper()}" for size in ("0.6b", "1.7b", "4b", "8b")},
    **{f"qwen2.5-{size}": f"Qwen/Qwen2.5-{size.upper()}" for size in ("0.5b", "1.5b", "3b", "7b")},
    **{f"llama-{size}": f"meta-llama/Llama-{size.upper()}" for size in ("3.1-8b", "3.2-1b", "3.2-3b")},
    **{f"gemma-{size}": f"google/gemma-{size}" for size in ("2-2b", "2-9b", "3-270m")},
    **{f"gemma-{size}": f"google/gemma-{size}-pt" for size in ("3-1b", "3-4b")},
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
}
ALIASES = {
    "4b": "qwen3-4b",
    "smollm2": "smollm2-135m",  # those of `pretrained`, by the same names
    "gemma3-270m": "gemma-3-270m",
}


def shape_of(name: str) -> ModelShape:
    """The shape of a preset, a config.json, a model directory, a GGUF file or an id in the local Hugging Face cache.

    Raises ConfigError, naming the nearest presets or the missing key.
    """
    if (file := _packed(name)) is None:
        return from_config(*fields_of(name))
    header = read_header(file)
    shape = from_config(config_fields(file, header), name)
    check_numbers(file, header, shape.parameters)
    return shape


def fields_of(name: str) -> tuple[dict[str, Any], str]:
    """The configuration that a name stands for, and the name that errors about it should say. Raises ConfigError."""
    known = _preset(name)
    if known in CONFIGS:
        check_known(name)
        return CONFIGS[known], known
    if (file := _packed(name)) is not None:
        return config_fields(file, read_header(file)), name
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise ConfigError(f"model {name}: no config.json in this directory")
    if path.is_file():
        return _read(path), name
    if path.suffix == ".json" or path.is_absolute() or name.startswith(("./", "../")):  # none of them is an id
        raise ConfigError(f"model {name}: there is no such file or directory")
    if name.count("/") == 1:
        return _read(_cached(name)), name
    near = get_close_matches(known, [*CONFIGS, *ALIASES], n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}" if near else f"presets are {', '.join([*CONFIGS, *ALIASES])}"
    raise ConfigError(
        f"unknown model {name!r}: {hint}; or give a config.json, a GGUF file or a model id (owner/name) in the cache"
    )


def _preset(name: str) -> str:
    """What a preset of this name is called in the catalogue. Raises ConfigError for no name, which is no folder."""
    if not name:
        raise ConfigError("model: expected a preset, a path or a model id (owner/name), got nothing")
    return ALIASES.get(name.lower(), name.lower())


def _packed(name: str) -> Path | None:
    """The GGUF file that a name stands for; None for a preset, and for what is no such file."""
    return None if _preset(name) in CONFIGS else file_of(name)


def _cached(name: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ConfigError(f"model {name!r}: {in_one_line(error, 500)}") from None
    if not isinstance(found, str):
        near = get_close_matches(name.split("/")[1].lower(), CONFIGS, n=1, cutoff=0.6)
        hint = f"; its shape may be the preset {near[0]}" if near else ""
        raise ConfigError(f"model {name} is not in the local cache: download it, or give its config.json{hint}")
    return Path(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable JSON file ({in_one_line(error)})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a table of configuration fields, got {type(config).__name__}")
    return config


def from_config(config: dict[str, Any], name: str) -> ModelShape:
    """The shape that a transformers configuration describes; of a multimodal one, its text part."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"model {name}: its configuration has no model_type; add it")
    if kind not in FAMILIES:
        from .on_meta import shape_on_meta  # transformers and torch, only for what the table above does not have

        return shape_on_meta(config, name)
    family = FAMILIES[kind]
    c = {key: value for key, value in {**family.defaults, **config}.items() if value is not None}  # null: none of it
    sizes = {key: _size(c, key, name) for key in REQUIRED}
    heads = sizes["num_attention_heads"]
    kv_heads = _size(c, "num_key_value_heads", name, heads)
    if heads % kv_heads:
        expected = f"num_attention_heads must be a multiple of num_key_value_heads ({kv_heads})"
        raise ConfigError(f"model {name}: {expected}, got {heads}")
    layers = sizes["num_hidden_layers"]
    window, windowed = _windows(c, family, layers, name)
    bias = _flag(c, "attention_bias", name)
    return ModelShape(
        name=name,
        vocab=sizes["vocab_size"],
        hidden=sizes["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(c, "head_dim", name, max(1, sizes["hidden_size"] // heads)),
        mlp=sizes["intermediate_size"],
        tied=_flag(c, "tie_word_embeddings", name),
        norms=family.norms,
        qk_norm=family.qk_norm,
        fp32_norm=family.fp32_norm,
        qkv_bias=_flag(c, "qkv_bias", name, family.qkv_bias) or bias,
        out_bias=bias,
        mlp_bias=_flag(c, "mlp_bias", name),
        softcap=bool(c.get("final_logit_softcapping")),
        attention_softcap=bool(c.get("attn_logit_softcapping")),
        window=window,
        windowed_layers=windowed,
        **_positions(c, family),
        **_experts(c, name, layers, family.experts),
    )


def _size(config: dict[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise ConfigError(f"model {name}: its configuration has no {key}; add it")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise ConfigError(f"model {name}: {key} must be a whole number of 1 to 2^63-1, got {value!r}")
    return value


def _flag(config: dict[str, Any], key: str, name: str, default: bool = False) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"model {name}: {key} must be true or false, got {value!r}")
    return value


def _windows(c: dict[str, Any], family: Family, layers: int, name: str) -> tuple[int, int]:
    """(tokens of a window, number of layers that have one)."""
    if not c.get("sliding_window") or not _flag(c, "use_sliding_window", name, default=True):
        return 0, 0
    window = _size(c, "sliding_window", name)
    if isinstance(c.get("layer_types"), list):
        return window, sum(kind == "sliding_attention" for kind in c["layer_types"][:layers])
    every = c.get("sliding_window_pattern") or family.window_every
    if isinstance(every, int) and every > 0:
        return window, layers - layers // every
    return (window, layers) if c.get("model_type") in ("mistral", "mixtral") else (0, 0)


def _positions(c: dict[str, Any], family: Family) -> dict[str, Any]:
    """How far positions reach; only a configuration that states its rotary embeddings says that they stretch."""
    longest, rotary = c.get("max_position_embeddings"), c.get("rope_parameters")
    if rotary is None and "rope_theta" in c and c.get("rope_scaling") is None:
        rotary = {"rope_type": "default"}  # as configurations said it before transformers 5
    older = c.get("rope_scaling")
    if family.rotary_by_layer and isinstance(older, dict):
        older = {"full_attention": older}  # as transformers reads it
    stated = rotary if isinstance(rotary, dict) else older
    if isinstance(longest, bool) or not isinstance(longest, int) or not isinstance(stated, dict | None):
        return {}
    try:
        return {"positions": reached(longest, stated), "stretches": stated is rotary and plain(rotary)}
    except (TypeError, ValueError, OverflowError):  # a factor that is no number: whoever builds the model refuses it
        return {}


def _experts(c: dict[str, Any], name: str, layers: int, keys: tuple[str, ...]) -> dict[str, Any]:
    key = next((key for key in keys if c.get(key)), None)
    if key is None:
        return {}
    step = _size(c, "decoder_sparse_step", name, 1)
    listed = c.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
        raise ConfigError(f"model {name}: mlp_only_layers must be a list of layers, got {listed!r}")
    plain = {i for i in listed if 0 <= i < layers and (i + 1) % step == 0}
    own = "moe_intermediate_size" if "moe_intermediate_size" in c else "intermediate_size"
    return {
        "moe_layers": layers // step - len(plain),
        "experts": _size(c, key, name),
        "active_experts": _size(c, "num_experts_per_tok", name),
        "expert_mlp": _size(c, own, name),
        "shared_mlp": _size(c, "shared_expert_intermediate_size", name) if c.get("model_type") == "qwen2_moe" else 0,
        "adapted_experts": c.get("model_type") in ("mixtral", "qwen3_moe"),
    }
