"""transformers models as readers of soft tokens: cached steps against whole prefixes, wrapped by PEFT or not."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from logitless.errors import ConfigError
from logitless.integrations.transformers.soft_tokens import reader_of, table_of
from logitless.models.instances import with_adapters
from logitless.relax import Sampling, generate
from tests.support.integrations.masked import MASKED
from tests.support.integrations.tiny import TINY, halved

VOCAB, T = 97, 4


def prompts() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(8, VOCAB, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask, torch.tensor([3, 4])


def gradients(model, carry: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    sampling = Sampling(T, 1.5, k=VOCAB, hard=True, carry=carry, tolerance=0.0)
    rollout = generate(reader_of(model, VOCAB), *prompts(), sampling)
    values = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rollout.backward((rollout.soft.weights * values[rollout.soft.ids]).sum())
    return rollout.soft.token, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["qwen3-tied", "granite-scaling", "gemma3-softcap", "gpt2-tied", "phi-bias"])
def test_every_carry_gives_one_gradient(name):
    model = TINY[name].build(VOCAB).double().eval()
    token, exact = gradients(model, "recompute")
    for carry in ("cached", "sweeps"):
        found_token, found = gradients(model, carry)
        assert found_token.equal(token)
        assert found.keys() == exact.keys()
        largest = max(float(x.norm()) for x in exact.values())
        for key, x in exact.items():
            assert float((found[key] - x).norm()) < 1e-5 * (float(x.norm()) + 1e-3 * largest), (
                key
            )  # norms are fp32 inside


def test_the_policy_without_its_adapters_is_the_reference():
    model = with_adapters(TINY["qwen3-tied"].build(VOCAB), 4).eval()
    policy, reference = reader_of(model, VOCAB), reader_of(model, VOCAB, without_adapters=True)
    first = generate(policy, *prompts(), Sampling(T, k=9), reference=reference)
    assert not first.kl.detach().any()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    later = generate(policy, *prompts(), Sampling(T, k=9), reference=reference)
    assert bool((later.kl > 0).all())
    later.backward(later.kl.sum())
    assert all(p.grad is None for n, p in model.named_parameters() if "lora" not in n)
    assert any(bool(p.grad.any()) for n, p in model.named_parameters() if "lora_A" in n)


def test_no_layer_is_asked_for_its_status_at_a_token(monkeypatch):
    """As `disable_adapter` asks all modules, for as long as a small model takes to read one; what is off stays off."""
    model = with_adapters(TINY["qwen3-tied"].build(VOCAB), 4).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    ids, mask, _ = prompts()
    read = model.get_input_embeddings()(ids).detach(), mask, None
    with model.disable_adapter():
        expected = reader_of(model, VOCAB).body(*read)[0]
    off = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    off.enable_adapters(False)
    monkeypatch.setattr(type(model), "get_model_status", None)
    assert reader_of(model, VOCAB, without_adapters=True).body(*read)[0].equal(expected)
    enabled = [not x.disable_adapters for x in model.modules() if isinstance(x, BaseTunerLayer)]
    assert off.disable_adapters
    assert sum(enabled) == len(enabled) - 1 > 0


def test_the_reference_of_a_model_whose_adapters_are_off_leaves_them_off():
    model = with_adapters(TINY["qwen3-tied"].build(VOCAB), 4).eval()
    ids, mask, _ = prompts()
    reference = reader_of(model, VOCAB, without_adapters=True)
    model.base_model.disable_adapter_layers()
    reference.body(model.get_input_embeddings()(ids), mask, None)
    assert all(x.disable_adapters for x in model.modules() if isinstance(x, BaseTunerLayer))
    model.base_model.enable_adapter_layers()
    reference.body(model.get_input_embeddings()(ids), mask, None)
    assert not any(x.disable_adapters for x in model.modules() if isinstance(x, BaseTunerLayer))


def test_trained_biases_stay_in_the_reference_and_are_warned_of():
    model = get_peft_model(TINY["qwen3-tied"].build(VOCAB), LoraConfig(target_modules=["q_proj"], bias="all"))
    ids, mask, _ = prompts()
    with pytest.warns(UserWarning, match="with bias configured to be 'all' does not produce the same output"):
        reader_of(model, VOCAB, without_adapters=True).body(model.get_input_embeddings()(ids), mask, None)


def test_without_adapters_is_of_a_model_that_has_some():
    with pytest.raises(ConfigError, match="without_adapters: expected a model that PEFT wraps, got Qwen3ForCausalLM"):
        reader_of(TINY["qwen3-tied"].build(VOCAB), VOCAB, without_adapters=True)


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3-softcap"])
def test_a_table_is_what_the_embedding_gives(name):
    model = TINY[name].build(VOCAB)
    for rows in (VOCAB, VOCAB - 7):
        torch.testing.assert_close(table_of(model, rows), model.get_input_embeddings()(torch.arange(rows)))
    with pytest.raises(
        ConfigError, match=f"vocab_size: expected {VOCAB} at most, the embedding's rows, got {VOCAB + 1}"
    ):
        reader_of(model, VOCAB + 1)
    assert reader_of(model, VOCAB - 7).head().rows == VOCAB - 7  # rows of padding are no tokens
    model.get_input_embeddings().register_forward_hook(lambda module, given, rows: rows + 1)
    with pytest.raises(ConfigError, match="its embedding is not a plain table, which soft tokens need"):
        reader_of(model, VOCAB)


@pytest.mark.parametrize("name", ["qwen3-tied", "gpt2-tied"])
def test_positions_count_from_the_first_token(name):
    """Also of prompts that are padded on the left: by each alone, of learned positions too."""
    model = TINY[name].build(VOCAB).double().eval()
    reader, (ids, mask, _) = reader_of(model, VOCAB), prompts()
    with torch.no_grad():
        hidden, _ = reader.body(reader.table[ids], mask, None)
        for row, text, real in zip(hidden, ids, mask.bool(), strict=True):
            expected = model(text[real][None]).logits[0]
            torch.testing.assert_close(row[real] @ model.get_output_embeddings().weight.T, expected)


def test_a_model_that_changes_its_logits_in_a_way_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM changes its logits otherwise than by scale 1"):
        generate(reader_of(halved(TINY["qwen3-tied"].build(VOCAB)), VOCAB), *prompts(), Sampling(T, k=9))


def test_keys_and_values_of_different_shapes_are_refused():
    """Gemma 3n's shared layers and latent attention; here keys wider than values."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ranks = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
    config = DeepseekV3Config(vocab_size=VOCAB, num_key_value_heads=2, first_k_dense_replace=2, **sizes, **ranks)
    policy = reader_of(DeepseekV3ForCausalLM(config).eval(), VOCAB)
    with pytest.raises(ConfigError, match=r"DeepseekV3ForCausalLM: methods on soft tokens need 2 layers .* 1x4, 1x8"):
        generate(policy, *prompts(), Sampling(T, k=9))
    model = TINY["qwen3-tied"].build(VOCAB).eval()
    model.config.num_hidden_layers = 3  # as where a layer reads another's
    with pytest.raises(ConfigError, match=r"need 3 layers .* got 2 with"):
        generate(reader_of(model, VOCAB), *prompts(), Sampling(T, k=9))


def test_layers_that_keep_something_else_are_refused():
    """Convolutions, linear attention and states, as of Qwen 3.5, LFM2, Mamba and RWKV."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    mixed = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    for model, kept in (
        (Lfm2ForCausalLM(Lfm2Config(**sizes, **mixed)), "LinearAttentionLayer"),
        (RwkvForCausalLM(RwkvConfig(**sizes)), "a state"),
    ):
        with pytest.raises(ConfigError, match=f"need layers that keep keys and values alone; got {kept}: use another"):
            reader_of(model, VOCAB)


def test_an_encoder_is_refused():
    with pytest.raises(ConfigError, match="BertForMaskedLM: methods on soft tokens need tokens that see those before"):
        reader_of(MASKED["bert"].build(VOCAB), VOCAB)
