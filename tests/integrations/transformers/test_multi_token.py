"""transformers' multi-token prediction modules: its own drafts with them, and their loss from whole logits."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig
from transformers.modeling_layers import MtpModel

import logitless as ll
from logitless.errors import ConfigError, ShapeError
from logitless.integrations.transformers.lm_head import forward_with, through_head
from logitless.integrations.transformers.multi_token import mtp_hidden_states
from logitless.multi_token import multi_token_cross_entropy

V, DEPTHS = 97, 2
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": DEPTHS,
    "initializer_range": 0.3,
}
RANKS: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
WIDTH: dict[str, Any] = {"head_dim": 16}
CONFIGS = {"deepseek-v3": DeepseekV3Config(**SIZES, **RANKS), "glm4-moe": Glm4MoeConfig(**SIZES, **WIDTH)}


def make(name: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], experts_implementation="eager").double().eval()
    mtp = MtpModel(model, DEPTHS).double().eval()
    mtp.layers.apply(model._init_weights)  # it leaves new experts uninitialised
    return model, mtp, torch.randint(V, (2, 12))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_depth_is_that_of_transformers_own_draft(name):
    model, mtp, ids = make(name)
    known = 7
    with torch.no_grad():
        hidden = ll.hidden_states(model, {"input_ids": ids})
        places = torch.arange(1, known + 1).expand(2, -1)
        drafted, logits, _ = mtp(ids[:, 1 : known + 1], hidden[:, :known], None, places, None)
        text = ids.clone()
        text[:, known + 1 : known + 1 + DEPTHS] = drafted  # the later depths of a draft read what it drafted
        found = mtp_hidden_states(mtp, ll.hidden_states(model, {"input_ids": text}), text)
        own = torch.stack([model.lm_head(each[:, known - 1]) for each in found], 1)
    torch.testing.assert_close(own, logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(name):
    model, mtp, ids = make(name)
    weights = (1.0, 0.3, 0.2)
    parameters = [x for x in {*model.parameters(), *mtp.parameters()} if x.requires_grad]

    def all_hiddens() -> list[torch.Tensor]:
        hidden = ll.hidden_states(model, {"input_ids": ids})
        return [hidden, *mtp_hidden_states(mtp, hidden, ids)]

    loss = multi_token_cross_entropy(all_hiddens(), ll.LMHead.of(model), ids, weights=weights).loss
    expected = torch.zeros(()).double() + sum(
        weight * F.cross_entropy(model.lm_head(hidden)[:, : -1 - k].flatten(0, 1), ids[:, 1 + k :].flatten())
        for k, (weight, hidden) in enumerate(zip(weights, all_hiddens(), strict=True))
    )
    torch.testing.assert_close(loss, expected)
    for own, right in zip(
        torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(expected, parameters, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(own, right)


def test_packed_documents_are_as_each_by_itself():
    model, mtp, ids = make("deepseek-v3")
    ids, cut = ids[:1], 5
    places = torch.cat([torch.arange(cut), torch.arange(ids.shape[1] - cut)])[None]

    def total(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = ll.hidden_states(model, {"input_ids": ids, "position_ids": places})
        hiddens = [hidden, *mtp_hidden_states(mtp, hidden, ids, places)]
        head = ll.LMHead.of(model)
        return multi_token_cross_entropy(hiddens, head, ids, position_ids=places, denominator=1.0).each

    parts = [total(ids[:, part], places[:, part]) for part in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(total(ids, places), sum(parts))


def test_inside_the_heads_own_call_as_sharded_weights_need_it():
    model, mtp, ids = make("deepseek-v3")

    def end(owner, hidden):
        hiddens = torch.stack([hidden, *mtp_hidden_states(mtp, hidden, ids)])
        return through_head(owner, lambda head, x: multi_token_cross_entropy(x, head, ids).loss, hiddens)

    hidden = ll.hidden_states(model, {"input_ids": ids})
    expected = multi_token_cross_entropy([hidden, *mtp_hidden_states(mtp, hidden, ids)], ll.LMHead.of(model), ids)
    torch.testing.assert_close(forward_with(model, {"input_ids": ids}, end), expected.loss)


def test_other_tokens_and_a_head_that_divides_are_refused():
    model, mtp, ids = make("deepseek-v3")
    hidden = ll.hidden_states(model, {"input_ids": ids})
    with pytest.raises(ShapeError, match=r"expected \(2, 12\), as hidden has, got \(2, 11\)"):
        mtp_hidden_states(mtp, hidden, ids[:, 1:])
    mtp.config.logits_mup_width_multiplier = 4.0
    with pytest.raises(ConfigError, match="one that divides them"):
        mtp_hidden_states(mtp, hidden, ids)
