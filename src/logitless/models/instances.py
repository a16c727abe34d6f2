"""transformers models from a name or a configuration, their attention layers, checkpointing and adapters."""

from __future__ import annotations

import re
import warnings
from typing import Any

from ..errors import ConfigError, in_one_line
from .catalog import fields_of, from_config

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
UNLIKE = ("attn_logit_softcapping", "sinks", "attention_chunk_size")
DECODERS = ("gpt_neox", "gpt_neox_japanese", "evolla")  # whose configurations say that they are none
BOTH_WAYS = ("cpmant", "xlnet")  # whose attention has no direction, which their configurations do not say
DIRECTIONS = ("causal", "is_causal")  # what others call it


def configuration(name: str) -> Any:
    """transformers' configuration of the model that `shape_of` finds by this name. Raises ConfigError."""
    fields, known = fields_of(name)
    from_config(fields, known)  # names a missing key, or a size without a meaning
    inner = fields.get("text_config")
    fields = inner if isinstance(inner, dict) else fields
    if "sliding_window" in fields:
        fields = {**fields, "sliding_window": fields["sliding_window"] or None}  # 0 is none, too
    return config_of(fields, known)


def config_of(values: Any, name: str) -> Any:
    """transformers' configuration with these fields. Raises ConfigError where they make none."""
    from transformers import AutoConfig

    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"--model {name}: expected a transformers configuration with a model_type")
    fields = dict(values)
    if "auto_map" in fields:
        raise ConfigError(f"--model {name}: needs code of its own (auto_map), which is never run")
    try:
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # configuration classes validate in their own ways
        raise ConfigError(f"--model {name}: {in_one_line(error, 300)}") from None


def sees_ahead(config: Any) -> bool:
    """Whether tokens see those that follow them, as an encoder's do, also where a decoder reads it."""
    alone = getattr(config, "is_decoder", True) is False and config.model_type not in DECODERS
    encodes = alone or getattr(config, "is_encoder_decoder", False)
    said = any(getattr(config, name, True) is False for name in DIRECTIONS)
    of_gemma = getattr(config, "use_bidirectional_attention", None) is True
    return encodes or said or of_gemma or config.model_type in BOTH_WAYS


def any_layer(name: str) -> str:
    """The name of a tensor or module with its layer left open: "model.layers.*.mlp"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def attention_layers(model: Any, wish: str, *unlike: str) -> list[Any]:
    """The layers of a model whose attention is causal softmax attention, as Qwen3's or Llama's is.

    wish: what asks for them; unlike: what else no layer may have. Raises ConfigError where there are none, or others.
    """
    layers = [m for m in model.modules() if all(hasattr(m, name) for name in PROJECTIONS)]
    found = [name for name in (*UNLIKE, *unlike) for m in layers if getattr(m, name, None) is not None]
    found += ["attention that is not causal" for m in layers if getattr(m, "is_causal", True) is False]
    if found or not layers or not hasattr(model.config.get_text_config(), "num_key_value_heads"):
        what = f"{found[0]} in its attention" if found else f"no attention layers of {', '.join(PROJECTIONS)}"
        raise ConfigError(f"{wish} needs a model of Qwen3's or Llama's shape; {type(model).__name__} has {what}")
    return layers


def checkpoint_layers(model: Any) -> None:
    """Recompute layers in backward, without the reentrant form (it would lose a frozen embedding's gradient)."""
    if hasattr(model, "activation_checkpointing_enable"):  # the newer name
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def with_adapters(model: Any, rank: int) -> Any:
    """Low-rank adapters on every linear layer but the head, the rest frozen (LoRA, Hu et al., arXiv 2106.09685)."""
    from peft import LoraConfig, TaskType, get_peft_model

    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # PEFT 0.21 asks for this name
        warnings.filterwarnings("ignore", ".*_pattern keys did not match", RuntimeWarning)  # its own, of experts
        warnings.filterwarnings("ignore", "fan_in_fan_out is set", UserWarning)  # it then sets it, for GPT-2's layers
        return get_peft_model(model, lora)
