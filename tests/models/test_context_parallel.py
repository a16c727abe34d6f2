"""Sequences shared by two and four ranks: one launch, a test for each case; and what is refused."""

import inspect

import pytest
import torch
from transformers import AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from logitless.errors import ConfigError, OptionError
from logitless.models.context_parallel import NAME, UNKNOWN, Part, attach, attend, gathered, window_or_padding
from tests.support.models.context_ranks import CASES, batch, model
from tests.support.vocab.sharding import assert_ok, launch

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 2.0}
LONGROPE |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
JAMBA = {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "intermediate_size": 16}  # and Mamba
JAMBA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 1}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("tests.support.models.context_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_shared_by_ranks(found, case, size):
    assert_ok(found, case, size)


def test_parts_of_a_batch():
    whole = batch([[3, 5], [8]])
    parts = [Part(rank, 2, "").cut(whole) for rank in range(2)]
    for name in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([part[name] for part in parts], 1), whole[name])
    labels = torch.cat([part["labels"] for part in parts], 1)
    assert torch.equal(labels[:, :-1], whole["labels"][:, 1:])
    assert (labels[:, -1] == -100).all()
    assert all(torch.equal(part["labels"], part["shift_labels"]) for part in parts)
    del whole["position_ids"]
    assert Part(1, 2, "").cut(whole)["position_ids"].tolist() == [[4, 5, 6, 7]] * 2


def test_padding_is_refused_by_every_rank():
    """By those too whose part has none, which would wait for the others' keys."""
    padded = batch([[8], [8]])
    padded["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
    assert "attention_mask" not in Part(0, 2, "").cut(padded)
    padded["attention_mask"][1, 6:] = 0
    for rank in range(2):
        with pytest.raises(OptionError, match="expected packed rows, got padding: 2 tokens"):
            Part(rank, 2, "").cut(padded)


def test_a_length_that_ranks_cannot_share():
    with pytest.raises(OptionError, match="that 3 ranks can share evenly, got 8 tokens"):
        Part(0, 3, "").cut(batch([[8]]))


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("gpt2", {"n_layer": 1, "n_head": 2}, "no attention layers of q_proj"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
        ("qwen3", {"rope_parameters": LONGROPE}, "longrope rotary"),
        ("jamba", JAMBA, "JambaForCausalLM has layers without q_proj, k_proj, v_proj, o_proj"),
        ("qwen3", {"attention_dropout": 0.1}, "attention dropout, got 0.1: set attention_dropout to 0"),
        ("gemma2", {"head_dim": 8}, "attn_logit_softcapping in its attention"),
        ("gemma3_text", {"head_dim": 8, "use_bidirectional_attention": True}, "attention that is not causal in its"),
    ],
)
def test_models_that_are_refused_are_left_alone(kind, more, message):
    config = AutoConfig.for_model(kind, **{"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, **more})
    one = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=message):
        attach(one, None)
    assert one.config._attn_implementation != NAME


def test_calls_that_are_refused():
    layer = model().model.layers[0].self_attn
    q = torch.zeros(1, 4, 3, 8)
    k = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ConfigError, match="no attention dropout, got 0"):
        attend(layer, q, k, k, None, dropout=0.1)
    with pytest.raises(ConfigError, match="no cache, got 2 keys"):
        attend(layer, q[:, :, :1], k, k, None)
    for name in UNKNOWN:
        with pytest.raises(ConfigError, match=f"knows no {name} in attention"):
            attend(layer, q, k, k, None, **{name: torch.zeros(4)})
    layer.context_part = Part(0, 2, "")
    with pytest.raises(ConfigError, match="got an attention_mask"):
        gathered(layer, k, k, torch.ones(1, 3), torch.arange(3))
    with pytest.raises(ConfigError, match="got attention without position_ids"):
        gathered(layer, k, k, None, None)


def test_masks_of_another_kind_are_refused():
    """transformers' own functions make them: by a function of the caller's, and of chunks."""
    config = AutoConfig.for_model("qwen3", sliding_window=5, use_sliding_window=True)
    config._attn_implementation = NAME
    AttentionMaskInterface.register(NAME, window_or_padding)
    embeds = torch.zeros(1, 8, 4)
    given = {"config": config, "inputs_embeds": embeds, "attention_mask": None}
    renamed = "cache" in inspect.signature(create_causal_mask).parameters  # from transformers 5.24 on
    given["cache" if renamed else "past_key_values"] = None
    given["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    assert create_causal_mask(**given) is None
    assert create_sliding_window_causal_mask(**given) == 5
    config.attention_chunk_size = 4
    for refused in (
        lambda: create_chunked_causal_mask(**given),
        lambda: create_causal_mask(**given, or_mask_function=lambda row, head, query, key: query < 2),
        lambda: create_bidirectional_mask(config, embeds, None),
    ):
        with pytest.raises(ConfigError, match="expected a causal mask with or without a sliding window, got another"):
            refused()


def test_mixed_precision_computes_in_the_values_dtype():
    layer = model().model.layers[0].self_attn
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8).bfloat16()
    result, _ = attend(layer, q, k, v, None, position_ids=torch.arange(3)[None])
    assert result.dtype == torch.bfloat16
