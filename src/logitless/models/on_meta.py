"""Shapes of models outside of the catalogue: transformers builds them on the meta device and counts."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from ..errors import ConfigError, in_one_line
from .positions import plain, reach
from .shapes import ModelShape


def shape_on_meta(config: dict[str, Any], name: str) -> ModelShape:
    """The shape of any causal LM that transformers knows; exact parameters, sizes as of a Llama's layer.

    Raises ConfigError where transformers does not know the model, needs code of its own, or a size is missing.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if "auto_map" in config:
        raise ConfigError(f"model {name}: needs code of its own (auto_map), which is never run")
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        near = get_close_matches(kind, CONFIG_MAPPING.keys(), n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}" if near else ""
        raise ConfigError(f"model {name}: this transformers knows no model_type {kind!r}{hint}")
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        full = AutoConfig.for_model(kind, **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(full, trust_remote_code=False)
    except Exception as error:  # each configuration class fails in its own way
        raise ConfigError(f"model {name}: {in_one_line(error)}") from None
    parameters = sum(p.numel() for p in model.parameters())
    text = full.get_text_config()
    first = text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text  # whose layers differ
    shape = _llama_like(first, name, bool(full.tie_word_embeddings))
    return replace(shape, uncounted=parameters - shape.parameters)


def _llama_like(config: Any, name: str, tied: bool) -> ModelShape:
    def size(*keys: str) -> int:
        found = next((getattr(config, key) for key in keys if isinstance(getattr(config, key, None), int)), None)
        if found is None:
            raise ConfigError(f"model {name}: its configuration has no {keys[0]}; add it")
        return found

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    mlp = getattr(config, "intermediate_size", None) or 4 * hidden
    return ModelShape(
        name=name,
        vocab=size("vocab_size"),
        hidden=hidden,
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", "num_attention_heads"),
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        mlp=max(mlp) if isinstance(mlp, list) else mlp,  # of each layer its own: that which needs the most
        tied=tied,
        positions=reach(config) or 0,
        stretches=plain(getattr(config, "rope_parameters", None)),
    )
