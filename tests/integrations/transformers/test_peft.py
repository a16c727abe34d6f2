"""Adapters on the body and on the head: loss and gradients as PEFT computes them."""

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PromptTuningConfig, get_peft_model

import logitless
from logitless.errors import ConfigError
from logitless.integrations.transformers.lm_head import causal_lm
from tests.support.integrations.tiny import TINY, assert_same_gradients, batch_for, gradients

BODY = ["q_proj", "v_proj"]
CONFIGS = {
    "body": LoraConfig(r=2, target_modules=BODY, task_type="CAUSAL_LM"),
    "body and whole head": LoraConfig(r=2, target_modules=BODY, modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    "body and head": LoraConfig(r=2, target_modules=[*BODY, "lm_head"], task_type="CAUSAL_LM"),
    "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def adapted(name: str):
    model = get_peft_model(TINY["llama"].build(), CONFIGS[name])
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn_like(parameter))  # LoRA's B starts at 0
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients(name):
    own, ours, batch = adapted(name), adapted(name), batch_for("")
    logitless.install(ours, memory_budget=2**12)
    exact, found = gradients(own, lambda: own(**batch).loss), gradients(ours, lambda: ours(**batch).loss)
    assert ours(**batch).logits is None
    assert sum(g is not None for g in exact.values()) >= 1
    assert_same_gradients(found, exact, rtol=1e-3, floor=1e-5)
    logitless.uninstall(ours)
    assert ours(**batch).logits is not None


def test_adapters_added_after_install():
    model = TINY["llama"].build()
    logitless.install(model)
    model = get_peft_model(model, CONFIGS["body"])
    batch = batch_for("")
    assert model(**batch).logits is None
    assert causal_lm(model) is model.get_base_model()
    assert logitless.hidden_states(model, batch).shape == (2, 12, 16)
    merged = model.merge_and_unload()
    assert merged(**batch).logits is None


def test_adapters_of_several_kinds():
    """PEFT's mixed model, whose class has neither the model's forward nor a get_base_model."""
    low_rank = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    own, ours = (get_peft_model(TINY["llama"].build(), low_rank, mixed=True) for _ in range(2))
    for model in (own, ours):
        model.add_adapter("other", LoHaConfig(r=2, target_modules=["o_proj"], init_weights=False))
        model.set_adapter(["default", "other"])
    ours.load_state_dict(own.state_dict())
    batch = batch_for("")
    logitless.install(ours)
    exact, found = gradients(own, lambda: own(**batch).loss), gradients(ours, lambda: ours(**batch).loss)
    assert ours(**batch).logits is None
    assert_same_gradients(found, exact, rtol=1e-3, floor=1e-5)
    assert len(logitless.LMHead.of(ours).adapters) == 1
    logitless.uninstall(ours)
    assert ours(**batch).logits is not None


@pytest.mark.parametrize("name", ["body", "body and head"])
def test_a_batch_of_several_adapters(name):
    """PEFT chooses an adapter for each row within its layers: on the body as it is, on the head refused."""
    own, ours, batch = adapted(name).eval(), adapted(name).eval(), batch_for("")
    batch["adapter_names"] = ["default", "__base__"]
    logitless.install(ours)
    if name == "body":
        torch.testing.assert_close(ours(**batch).loss, own(**batch).loss)
    else:
        with pytest.raises(ConfigError, match="the output head was called with adapter_names, expected hidden states"):
            ours(**batch)
