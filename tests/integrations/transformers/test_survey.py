"""Every language model of transformers that a small configuration builds: its own loss, or a typed refusal."""

from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

import logitless
from logitless.errors import ConfigError

LARGEST = 30_000_000  # parameters; what ignores the sizes below is no test's size
BUILT = 95  # of transformers 5.24: 104 take the loss, 11 are decoders of older sequence-to-sequence models
MASKED_BUILT = 32  # of transformers 5.24: 34 take the loss, ESM and MobileBERT are refused
SIZES = {
    "vocab_size": 97, "vocab_size_per_layer_input": 97, "max_position_embeddings": 64, "n_positions": 64,
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "embedding_size": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "moe_intermediate_size": 16, "head_dim": 16,
    "shared_expert_intermediate_size": 16, "hidden_size_per_layer_input": 8, "dim_model_base": 16,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_head": 2, "n_heads": 2,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": None, "output_router_logits": False,
}  # fmt: skip
CANNOT_BUILD = (
    ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError, ImportError, AssertionError,
    StrictDataclassError,
)  # fmt: skip


def build(kind: str, name: str, inputs: dict[str, Any]) -> Any:
    """A small model in evaluation mode with the gradient of its own loss; None where these sizes make none."""
    try:
        with_sizes = transformers.CONFIG_MAPPING[kind]
        has = with_sizes()
        sizes = {field: size for field, size in SIZES.items() if hasattr(has, field)}
        if getattr(has, "layer_types", None):
            sizes["layer_types"] = list(has.layer_types)[:2]
        config = with_sizes(**sizes)
        torch.manual_seed(0)
        with torch.device("meta"):
            size = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
        if size > LARGEST or getattr(config, "text_config", None) is not None:
            return None
        model = getattr(transformers, name)(config).eval()
        loss = model(**inputs).loss
        loss.backward()
    except CANNOT_BUILD:
        return None
    return model, loss.item(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def survey(models: dict[str, str], inputs: dict[str, Any]) -> tuple[list[str], list[str], dict[str, Any]]:
    """(those whose loss and gradients are their own, those that are refused, the others)"""
    equal, refused, wrong = [], [], {}
    for kind, name in sorted(models.items()):
        built = build(kind, name, inputs)
        if built is None:
            continue
        model, loss, exact = built
        try:
            logitless.install(model)
        except ConfigError:
            refused.append(kind)
            continue
        model.zero_grad()
        output = model(**inputs)
        output.loss.backward()
        floor = 1e-4 * max(float(g.abs().max()) for g in exact.values())
        errors = {k: float((p.grad - exact[k]).abs().max() / (exact[k].abs().max() + floor))
                  for k, p in model.named_parameters() if k in exact}  # fmt: skip
        if (
            output.logits is None
            and output.loss.item() == pytest.approx(loss, rel=1e-5)
            and max(errors.values()) < 5e-3
        ):
            equal.append(kind)
        else:
            wrong[kind] = (output.loss.item(), loss, max(errors.values()))
    return equal, refused, wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_causal_language_model():
    equal, refused, wrong = survey(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, {**batch(), "use_cache": False})
    assert wrong == {}
    assert len(equal) >= BUILT
    assert len(refused) <= 15


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_masked_language_model():
    masked = {kind: name for kind, name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.items() if name.endswith("ForMaskedLM")}
    equal, refused, wrong = survey(masked, batch())
    assert wrong == {}
    assert len(equal) >= MASKED_BUILT
    assert refused == ["esm", "mobilebert"]
