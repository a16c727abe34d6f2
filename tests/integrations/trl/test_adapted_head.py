"""LoRA on lm_head: TRL's trainers take it, and both factors get their gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from logitless.errors import ConfigError
from logitless.integrations.trl.trainers import adapted_head, install
from tests.support.integrations.trl import runs


def adapted(place):
    config = LoraConfig(r=3, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(2)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(place), config)


def test_an_adapter_on_the_head_is_trained(untied):
    model = adapted(untied)
    with pytest.raises(ValueError, match="lm_head"):
        runs.sft(untied, model)
    model = adapted(untied)
    with adapted_head(model):
        trainer = runs.sft(untied, model)
    install(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = trainer.model(**inputs, use_cache=False).logits[:, :-1]
    exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    exact.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    dense = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert found.keys() == dense.keys()
    assert sum("lm_head.lora" in name for name in found) == 2
    for name, g in dense.items():
        torch.testing.assert_close(found[name], g, rtol=1e-3, atol=1e-5 * g.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize("make", [runs.dpo, runs.kto, runs.grpo, runs.rloo])
def test_an_adapter_on_the_head_of_every_trainer(untied, make):
    """The reference has no adapter: rewards and KL start at 0 only if it is switched off on the head too."""
    model = adapted(untied)
    with adapted_head(model):
        trainer = make(untied, model, max_steps=2)
    install(trainer)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lm_head.lora" in name}
    trainer.train()
    after = dict(model.named_parameters())
    moved = [name for name, p in before.items() if ".ref." not in name and not torch.equal(after[name], p)]
    assert len(moved) == 2


def test_no_adapter_on_the_head(place):
    with pytest.raises(ConfigError, match="none"), adapted_head(AutoModelForCausalLM.from_pretrained(place)):
        pass
