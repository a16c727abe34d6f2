"""transformers' multi-token prediction modules: its own drafts with them, and their loss from whole logits."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    DeepseekV3Config,
    Gemma2Config,
    Glm4MoeConfig,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.modeling_layers import MtpModel

import logitless as ll
from logitless.errors import ConfigError, OptionError, ShapeError
from logitless.integrations.transformers.lm_head import forward_with, through_head
from logitless.integrations.transformers.multi_token import MedusaHeads, MtpModules, mtp_hidden_states
from logitless.multi_token import multi_token_cross_entropy
from tests.support.allocations import trace_allocations
from tests.support.integrations.launching import torchrun

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
TINY: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
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


def installed(name: str):
    model, mtp, ids = make(name)
    ll.install(model, multi_token=MtpModules(mtp, (0.3, 0.2)))
    return model, mtp, ids


def dense(hiddens, heads, labels, weights, items=None):
    total = torch.zeros(()).double()
    for k, (weight, hidden, head) in enumerate(zip(weights, hiddens, heads, strict=True)):
        z, target = head(hidden)[:, : -1 - k].flatten(0, 1), labels[:, 1 + k :].flatten()
        total = total + weight * F.cross_entropy(z, target, reduction="sum") / (items or (target != -100).sum())
    return total


def assert_gradients(loss, expected, parameters) -> None:
    torch.testing.assert_close(loss, expected)
    own, right = (
        torch.autograd.grad(x, parameters, allow_unused=True, materialize_grads=True) for x in (loss, expected)
    )
    for got, want in zip(own, right, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_installed_model_has_the_loss_of_all_depths(name, items):
    model, mtp, ids = installed(name)
    labels = ids.clone()
    labels[0, :4] = labels[1, -2:] = -100
    more = {} if items is None else {"num_items_in_batch": items}
    loss = model(ids, labels=labels, **more).loss
    hidden = ll.hidden_states(model, {"input_ids": ids})
    hiddens = [hidden, *mtp_hidden_states(mtp, hidden, ids)]
    expected = dense(hiddens, [model.lm_head] * 3, labels, (1.0, 0.3, 0.2), items)
    assert_gradients(loss, expected, [x for x in model.parameters() if x.requires_grad])
    assert model.multi_token.each.shape == (3,)
    torch.testing.assert_close(loss.detach(), (torch.tensor([1.0, 0.3, 0.2]) * model.multi_token.each).sum().double())


def test_a_models_parameters_are_the_modules_too_until_it_is_uninstalled():
    model, mtp, ids = make("deepseek-v3")
    before, logits = set(model.state_dict()), model(ids).logits
    ll.install(model, multi_token=MtpModules(mtp))
    assert model.multi_token.weights == (0.15, 0.15)
    names = set(model.state_dict()) - before
    assert names == {f"multi_token.layers.{name}" for name in mtp.layers.state_dict()}
    assert {id(x) for x in mtp.layers.parameters()} <= {id(x) for x in model.parameters()}
    torch.testing.assert_close(model(ids).logits, logits)
    copied = copy.deepcopy(model)
    assert copied.multi_token.mtp.embed_tokens is copied.get_input_embeddings()
    torch.testing.assert_close(copied(ids, labels=ids).loss, model(ids, labels=ids).loss)
    ll.install(model)  # as a Trainer's install after the model's own does
    assert set(model.state_dict()) == before | names
    ll.uninstall(model)
    assert set(model.state_dict()) == before
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, expected.float())


def test_an_installed_model_is_saved_with_its_modules(tmp_path):
    model, heads, ids = medusa(1.0)
    greedy = {"max_new_tokens": 3, "do_sample": False}
    before = model.generate(ids, **greedy)
    ll.install(model, multi_token=heads)
    assert torch.equal(model.generate(ids, **greedy), before)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    again = MedusaHeads(model, 3)
    again.load_state_dict({name[12:]: x for name, x in saved.items() if name.startswith("multi_token.")})
    for name, x in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], x)


def test_packed_documents_of_an_installed_model():
    model, _, ids = installed("deepseek-v3")
    ids, cut = ids[:1], 5
    places = torch.cat([torch.arange(cut), torch.arange(ids.shape[1] - cut)])[None]
    labels = ids.clone()
    labels[0, cut] = -100
    whole = model(ids, labels=labels, position_ids=places, num_items_in_batch=1).loss
    parts = [
        model(ids[:, part], labels=ids[:, part], num_items_in_batch=1).loss for part in (slice(cut), slice(cut, None))
    ]
    torch.testing.assert_close(whole, sum(parts))


def test_labels_that_are_shifted_already():
    model, _, ids = installed("deepseek-v3")
    shifted = F.pad(ids, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, model(ids, labels=ids).loss)


def medusa(main_weight: float):
    torch.manual_seed(0)
    config = LlamaConfig(**TINY, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).double()
    heads = MedusaHeads(model, 3, main_weight=main_weight)
    for block in heads.blocks:
        torch.nn.init.normal_(block.weight, std=0.2)
    return model, heads, torch.randint(V, (2, 12))


@pytest.mark.parametrize("main_weight", [1.0, 0.0])
def test_medusa_heads_with_vocabularies_of_their_own(main_weight):
    model, heads, ids = medusa(main_weight)
    model.requires_grad_(main_weight > 0)
    ll.install(model, multi_token=heads)
    loss = model(ids, labels=ids).loss
    hidden = ll.hidden_states(model, {"input_ids": ids})
    hiddens = [hidden, *(hidden + F.silu(block(hidden)) for block in heads.blocks)]
    expected = dense(hiddens, [model.lm_head, *heads.vocabularies], ids, (main_weight, 0.8, 0.64, 0.512))
    assert_gradients(loss, expected, [x for x in model.parameters() if x.requires_grad])
    assert heads.each.shape == (3 + (main_weight > 0),)


def test_medusa_heads_begin_as_the_models_own():
    model, _, ids = medusa(1.0)
    heads = MedusaHeads(model, 2)
    hidden = ll.hidden_states(model, {"input_ids": ids})
    for x, vocabulary in zip(heads.depths(hidden, ids, None), heads.vocabularies, strict=True):
        torch.testing.assert_close(vocabulary(x), model.lm_head(hidden))
    low = ll.LowRank(torch.randn(2, 32), torch.randn(V, 2), 1.0)  # adapters of the model's head are not theirs
    of_theirs = heads.heads(replace(ll.LMHead.of(model), adapters=(low,)))
    assert [x.adapters for x in of_theirs] == [(), ()]


def test_medusa_heads_of_a_head_with_softcap_and_bias():
    model = AutoModelForCausalLM.from_config(Gemma2Config(**TINY, head_dim=16, final_logit_softcapping=5.0))
    model.lm_head = torch.nn.Linear(32, V)
    ids = torch.randint(V, (2, 12))
    ll.install(model, multi_token=MedusaHeads(model, 2, weights=(0.5, 0.25)))
    loss, z = model(ids, labels=ids).loss, model(ids).logits
    each = [F.cross_entropy(z[:, : -1 - k].flatten(0, 1), ids[:, 1 + k :].flatten()) for k in range(3)]
    torch.testing.assert_close(loss, each[0] + 0.5 * each[1] + 0.25 * each[2])


def test_under_adapters_and_padding_on_the_right():
    model, heads, ids = medusa(1.0)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    ll.install(wrapped, multi_token=heads)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, 8:], labels[1, 8:] = 0, -100
    loss = wrapped(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=1).loss
    parts = [wrapped(input_ids=x, labels=x, num_items_in_batch=1).loss for x in (ids[:1], ids[1:, :8])]
    torch.testing.assert_close(loss, sum(parts))
    loss.backward()
    assert all(x.grad is not None for x in heads.parameters())
    assert any("lora" in name and x.grad is not None for name, x in wrapped.named_parameters())


def test_the_models_own_product_is_left_out():
    model, heads, ids = medusa(0.0)
    model.requires_grad_(False)
    ll.install(model, multi_token=heads)
    shapes = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            shapes.extend(x.data_ptr() for x in args if isinstance(x, torch.Tensor) and x.shape[:1] == (V,))
            return func(*args, **(kwargs or {}))

    with Products():
        model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.data_ptr() not in shapes
    assert heads.vocabularies[0].weight.data_ptr() in shapes


def test_a_trainer_learns_every_depth(tmp_path):
    model, _, ids = medusa(1.0)
    heads = MedusaHeads(model.float(), 2)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids]
    given = TrainingArguments(
        tmp_path, max_steps=12, learning_rate=2e-2, report_to="none", use_cpu=True, disable_tqdm=True
    )
    data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": default_data_collator}
    trainer = Trainer(model=model, args=given, **data)
    ll.install(trainer, multi_token=heads)
    model(ids, labels=ids)
    before = heads.each
    trainer.train()
    model(ids, labels=ids)
    assert (heads.each < 0.7 * before).all()


@pytest.mark.parametrize("main_weight", [1.0, 0.0])
def test_an_evaluation_is_of_the_next_token_and_its_loss_the_sum(tmp_path, main_weight):
    model, heads, ids = medusa(main_weight)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids]
    given = TrainingArguments(tmp_path, report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model=model, args=given, eval_dataset=rows, data_collator=default_data_collator)
    ll.install(trainer, multi_token=heads)
    found = trainer.evaluate()
    with torch.no_grad():
        z, items = model(ids).logits[:, :-1].log_softmax(-1), ids[:, 1:].numel()  # as a Trainer counts them
        total = model(ids, labels=ids, num_items_in_batch=items).loss
    nats = F.nll_loss(z.flatten(0, 1), ids[:, 1:].flatten())
    assert found["eval_perplexity"] == pytest.approx(math.exp(nats), rel=1e-5)
    assert found["eval_accuracy"] == pytest.approx(float((z.argmax(-1) == ids[:, 1:]).double().mean()))
    assert found["eval_loss"] == pytest.approx(total.item(), rel=1e-5)


@pytest.mark.parametrize("whose", ["the trainer's", "the model's", "model_init's"])
def test_a_model_that_the_trainer_makes_anew_has_modules_of_its_own(tmp_path, whose):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in torch.randint(V, (2, 12))]

    def made():
        model = medusa(1.0)[0].float()
        if whose == "model_init's":
            ll.install(model, multi_token=MedusaHeads(model, 2))
        return model

    given = TrainingArguments(tmp_path, max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model_init=made, args=given, train_dataset=rows, data_collator=default_data_collator)
    first = MedusaHeads(trainer.model, 2)
    if whose == "the model's":
        ll.install(trainer.model, multi_token=first)
    ll.install(trainer, multi_token=first if whose == "the trainer's" else None)
    if whose == "model_init's":
        before = trainer.model.multi_token
        trainer.train()
        assert trainer.model.multi_token is not before
        assert trainer.model.multi_token.each.shape == (3,)
        return
    with pytest.raises(OptionError, match="multi_token: expected model_init to make its model with modules of its own"):
        trainer.train()


def test_no_logits_of_any_depth():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY | {"vocab_size": 4096}))
    ll.install(model, multi_token=MedusaHeads(model, 2), memory_budget=400_000)
    ids = torch.randint(4096, (2, 256))
    found = trace_allocations(lambda: model(ids, labels=ids).loss.backward())
    assert found.largest < ids.numel() * 4096 * 4 / 4


def test_what_modules_cannot_be_beside():
    model, mtp, ids = installed("deepseek-v3")
    with pytest.raises(ConfigError, match="expected input_ids, which its modules read too"):
        model(inputs_embeds=model.get_input_embeddings()(ids), labels=ids)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ConfigError, match="expected sequences padded on the right, got some padded on the left"):
        model(ids, labels=ids, attention_mask=mask)
    others = {"loss='auto'": {"loss": "auto"}, "label smoothing": {"label_smoothing": 0.1}}
    for got, more in others.items():
        with pytest.raises(OptionError, match=f"expected a causal model's own logitless loss, got {got}; leave out"):
            ll.install(model, **more)
    masked = AutoModelForMaskedLM.from_config(BertConfig(**TINY))
    with pytest.raises(OptionError, match="got a masked language model; leave out"):
        ll.install(masked, multi_token=MtpModules(mtp))
    with pytest.raises(OptionError, match="expected MtpModules, MedusaHeads or a MultiToken, got MtpModel"):
        ll.install(model, multi_token=mtp)
    with pytest.raises(OptionError, match="weights: expected 2, one for each module, got 1"):
        MtpModules(mtp, (0.3,))
    for wrong in (float("nan"), 1e300, 10**400, "0.3", None):
        with pytest.raises(OptionError, match="expected finite numbers, in float32 too, one for each depth, got"):
            MtpModules(mtp, (0.3, wrong))
        with pytest.raises(OptionError, match="expected finite numbers, in float32 too, one for each depth, got"):
            MtpModules(mtp, main_weight=wrong)


@pytest.mark.slow
def test_two_ranks_that_share_the_weights():
    torchrun("tests.support.integrations.multi_token_ranks")
