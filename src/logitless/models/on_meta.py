"""Shapes of models outside of the catalogue: transformers builds them on the meta device and counts."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from ..errors import ConfigError, in_one_line
from .positions import plain, reach
from .shapes import ModelShape

MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff", "decoder_ffn_dim")


def shape_on_meta(config: dict[str, Any], name: str) -> ModelShape:
    """The shape of any causal LM that transformers knows; exact parameters, sizes as of a Llama's layer or a Mixtral's.

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
    if CONFIG_MAPPING[kind] not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model {name}: transformers has no causal language model of model_type {kind!r}")
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
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    shape = _llama_like(first, name, tied)
    shape = replace(shape, moe_layers=_routed(model, shape), stateful=bool(getattr(model, "_is_stateful", False)))
    return replace(shape, uncounted=parameters - shape.parameters, in_catalog=False)


def _routed(model: Any, shape: ModelShape) -> int:
    """How many layers hold experts: matrices in a stack, or a list of modules."""
    from torch.nn import ModuleList

    def holds(module: Any) -> bool:
        stacked = any(p.dim() == 3 and len(p) == shape.experts for p in module.parameters(recurse=False))
        return stacked or (isinstance(module, ModuleList) and len(module) == shape.experts)

    return min(shape.moe_layers, sum(map(holds, model.modules())))


def _llama_like(config: Any, name: str, tied: bool) -> ModelShape:
    def size(*keys: str) -> int:
        found = next((getattr(config, key) for key in keys if isinstance(getattr(config, key, None), int)), None)
        if found is None:
            raise ConfigError(f"model {name}: its configuration has no {keys[0]}; add it")
        return found

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    return ModelShape(
        name=name,
        vocab=size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=size("num_key_value_heads", "num_attention_heads"),
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        mlp=_width(config, *MLP_WIDTHS) or 4 * hidden,
        tied=tied,
        softcap=bool(getattr(config, "final_logit_softcapping", None)),
        attention_softcap=bool(getattr(config, "attn_logit_softcapping", None)),
        positions=reach(config) or 0,
        stretches=plain(getattr(config, "rope_parameters", None)),
        **_experts(config, layers),
    )


def _width(config: Any, *keys: str) -> int:
    """The first of these sizes that a configuration says; 0: none."""
    found = next((value for key in keys if (value := getattr(config, key, None))), 0)
    return max(found) if isinstance(found, list) else found  # of each layer its own: that which needs the most


def _experts(config: Any, layers: int) -> dict[str, Any]:
    """A ModelShape's fields of layers that route, where a configuration says how many experts a token visits."""
    sizes = {
        "experts": _width(config, "num_experts", "num_local_experts"),
        "active_experts": _width(config, "num_experts_per_tok"),
        "expert_mlp": _width(config, "moe_intermediate_size", "intermediate_size"),
    }
    if not all(sizes.values()):
        return {}
    shared = _width(config, "shared_expert_intermediate_size")
    return {
        **sizes,
        "moe_layers": layers,
        "shared_mlp": shared or _width(config, "n_shared_experts", "num_shared_experts") * sizes["expert_mlp"],
    }
