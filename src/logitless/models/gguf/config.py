"""What a header says of a model and transformers leaves at its configurations' defaults (no torch import)."""

from __future__ import annotations

from typing import Any

from .header import Header

# Keys of a header, and what configurations call them, each by one of these names.
LEFT_OUT = {
    "context_length": ("n_positions",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models: llama.cpp knows them by nothing else


def complete(config: Any, header: Header) -> None:
    """Writes into a model's configuration what its header says of it."""
    own, fields = header.own, vars(config)
    if "attention.key_length_swa" in own:  # heads of two sizes, which transformers reads
        own.pop("attention.key_length", None)
    for key, names in LEFT_OUT.items():
        for name in fields.keys() & set(names) if key in own else ():
            setattr(config, name, own[key] or None)
    if "query_pre_attn_scalar" in fields:
        by_width = own.get("block_count") == SCALED_BY_WIDTH.get(header.architecture)
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if by_width else config.head_dim
    rotary = fields.get("rope_parameters") or {}
    far = rotary.get("full_attention", rotary)
    if far and "rope.freq_base" in own:
        far["rope_theta"] = own["rope.freq_base"]
    if "partial_rotary_factor" in rotary and "rope.dimension_count" in own:
        rotary["partial_rotary_factor"] = own["rope.dimension_count"] / head_dim(config)


def head_dim(config: Any) -> int:
    """Numbers of a head's query."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
