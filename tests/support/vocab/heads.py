"""Tiny transformers models with every kind of head, in float64, and what tests ask of them."""

import pytest
import torch
import transformers
from torch import nn

import logitless as ll
from logitless.errors import ConfigError

V, H = 37, 16
SMALL = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.5,
}
GPT2 = {"n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": 32}
GRIFFIN = {"lru_width": H, "attention_window_size": 8, "block_types": ["attention"]}
MODELS = {
    "qwen3, tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "llama": ("LlamaConfig", {}),
    "gemma2, softcap": ("Gemma2Config", {"final_logit_softcapping": 2.0}),
    "gemma2, no softcap": ("Gemma2Config", {"final_logit_softcapping": None}),
    "gemma3, softcap": ("Gemma3TextConfig", {"final_logit_softcapping": 2.0}),
    "cohere, logit_scale": ("CohereConfig", {"logit_scale": 0.3}),
    "cohere2, logit_scale": ("Cohere2Config", {"logit_scale": 0.3}),
    "granite, logits_scaling divides": ("GraniteConfig", {"logits_scaling": 7.0}),
    "hyperclovax, logits_scaling multiplies": ("HyperCLOVAXConfig", {"logits_scaling": 7.0}),
    "phi, bias": ("PhiConfig", {}),
    "gptj, bias": ("GPTJConfig", {**GPT2, "rotary_dim": 4}),
    "gpt2, tied": ("GPT2Config", GPT2),
    "mpt, logit_scale that its model does not apply": (
        "MptConfig",
        {"d_model": H, "n_heads": 2, "n_layers": 1, "max_seq_len": 32, "logit_scale": 0.5},
    ),
    "recurrent gemma, logits_soft_cap": ("RecurrentGemmaConfig", {**GRIFFIN, "logits_soft_cap": 2.0}),
}


def tiny(name: str) -> nn.Module:
    config, options = MODELS[name]
    config = getattr(transformers, config)(**{**SMALL, **options})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        nn.init.normal_(bias)
    return model


def token_ids() -> torch.Tensor:
    return torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(1))


def body(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model.base_model(ids, use_cache=False).last_hidden_state


def assert_same(got, expected, tolerance=1e-10):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def refused(module: nn.Module, *fragments: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ll.LMHead.of(module)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("LMHead")
    assert all(fragment in message for fragment in fragments), message
