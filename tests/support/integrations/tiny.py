"""Tiny random models, one of each kind of output head, with a batch that each of them takes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

WIDTH = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 8,
}
IMAGE = 5  # the id that an image's place has in the text


@dataclass(frozen=True)
class Tiny:
    """A model class and what its configuration has beyond WIDTH."""

    model: Any
    config: Any
    extra: dict[str, Any]
    base: dict[str, Any] | None = None

    def build(self, vocab: int = 97, **changes: Any) -> Any:
        torch.manual_seed(0)
        base = WIDTH if self.base is None else self.base
        model = self.model(self.config(**{"vocab_size": vocab, **base, **self.extra, **changes}))
        if hasattr(model.config, "num_experts_per_tok"):
            model.set_experts_implementation("eager")  # the grouped product takes no float64
        return randomised(model)


VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


@dataclass(frozen=True)
class Gemma3Vision:
    """Gemma 3 with its vision tower: an image of four tokens."""

    def build(self, vocab: int = 97, **changes: Any) -> Any:
        torch.manual_seed(0)
        config = t.Gemma3Config(
            text_config={"vocab_size": vocab, **WIDTH, "query_pre_attn_scalar": 8, **changes},
            vision_config={**VISION, "num_hidden_layers": 1},
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=6,
            eoi_token_index=7,
        )
        return randomised(t.Gemma3ForConditionalGeneration(config))


@dataclass(frozen=True)
class Llava:
    """A CLIP tower before a Llama: an image of four tokens."""

    def build(self, vocab: int = 97, **changes: Any) -> Any:
        torch.manual_seed(0)
        config = t.LlavaConfig(
            text_config=t.LlamaConfig(vocab_size=vocab, **{**WIDTH, **changes}),
            vision_config=t.CLIPVisionConfig(**VISION, num_hidden_layers=2),
            image_token_index=IMAGE,
            image_seq_length=4,
        )
        return randomised(t.LlavaForConditionalGeneration(config))


def randomised(model: nn.Module) -> nn.Module:
    """No bias, norm or projection that is still 0 or 1, which would hide an error."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def halved(model: Any) -> Any:
    """The model, which from now on halves its logits, as nothing in its configuration says."""
    whole = model.forward

    @functools.wraps(whole)
    def forward(*args: Any, return_dict: bool | None = None, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs, return_dict=True)
        output.logits = 0.5 * output.logits
        named = model.config.return_dict if return_dict is None else return_dict
        return output if named else output.to_tuple()

    model.forward = forward
    return model


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3, "eos_token_id": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TINY: dict[str, Tiny | Gemma3Vision | Llava] = {
    "qwen2": Tiny(t.Qwen2ForCausalLM, t.Qwen2Config, {}),
    "qwen3-tied": Tiny(t.Qwen3ForCausalLM, t.Qwen3Config, {"tie_word_embeddings": True}),
    "llama": Tiny(t.LlamaForCausalLM, t.LlamaConfig, {}),
    "mistral": Tiny(t.MistralForCausalLM, t.MistralConfig, {}),
    "gemma2-softcap": Tiny(
        t.Gemma2ForCausalLM, t.Gemma2Config, {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
    ),
    "gemma3-softcap": Tiny(
        t.Gemma3ForCausalLM, t.Gemma3TextConfig, {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    ),
    "cohere-scale": Tiny(t.CohereForCausalLM, t.CohereConfig, {"logit_scale": 0.25}),
    "granite-scaling": Tiny(t.GraniteForCausalLM, t.GraniteConfig, {"logits_scaling": 3.0}),
    "phi-bias": Tiny(t.PhiForCausalLM, t.PhiConfig, {}),
    "gpt2-tied": Tiny(t.GPT2LMHeadModel, t.GPT2Config, NO_DROPOUT, GPT2),
    "gpt-neox": Tiny(t.GPTNeoXForCausalLM, t.GPTNeoXConfig, {}),
    "olmo2": Tiny(t.Olmo2ForCausalLM, t.Olmo2Config, {}),
    "qwen3-moe": Tiny(
        t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig, {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 8}
    ),
    "mixtral": Tiny(t.MixtralForCausalLM, t.MixtralConfig, {**EXPERTS, "num_local_experts": 4}),
    "deepseek-v2": Tiny(t.DeepseekV2ForCausalLM, t.DeepseekV2Config, {**EXPERTS, **LATENT, "n_routed_experts": 4}),
    "gemma3-vision": Gemma3Vision(),
    "llava-vision": Llava(),
}


def batch_for(name: str, vocab: int = 97, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Ids with padding on the right, labels with ignored places; an image where the model takes one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(8, vocab, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :2] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if "vision" in name:
        ids[:, 1:5] = IMAGE
        labels[:, 1:5] = -100
        if "gemma" in name:
            batch["token_type_ids"] = (ids == IMAGE).long()
        batch["pixel_values"] = torch.randn(rows, 3, 28, 28, generator=generator)
    return batch


def dense_loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    """transformers' ForCausalLMLoss without its rounding to float32."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    total = nn.functional.cross_entropy(logits.reshape(-1, vocab_size), targets, reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """Every parameter's gradient after `loss().backward()`."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(
    found: dict[str, Tensor | None], exact: dict[str, Tensor | None], rtol: float, floor: float
) -> None:
    """Within `rtol`, and within `floor` of the largest entry; a gradient that is 0 but for rounding hides in others.

    That of a key's bias is: what all of a row's scores gain, softmax takes away.
    """
    assert found.keys() == exact.keys()
    most = max(float(g.abs().max()) for g in exact.values() if g is not None)
    for name, expected in exact.items():
        if expected is None:
            assert found[name] is None, name
            continue
        assert float(expected.abs().max()) > 0 or "expert" in name, name
        rounding = torch.finfo(expected.dtype).eps * most
        atol = max(floor * max(1e-3 * most, float(expected.abs().max())), rounding)
        torch.testing.assert_close(found[name], expected, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
