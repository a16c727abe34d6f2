"""LoRA on lm_head: TRL's trainers take it, and both factors get their gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from logitless.errors import ConfigError
from logitless.integrations.trl.trainers import adapted_head, install
from tests.support.integrations.trl import runs


def adapted(place, *others):
    config = LoraConfig(r=3, target_modules=["lm_head", *others], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(2)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(place), config)


def test_an_adapter_on_the_head_is_trained(untied):
    model = adapted(untied, "q_proj")
    with pytest.raises(ValueError, match="lm_head"):
        runs.sft(untied, model)
    model = adapted(untied, "q_proj")
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


SLOW = [
    pytest.param(make, *log, marks=pytest.mark.slow, id=make.__name__)
    for make, *log in ((runs.dpo, "rewards/margins", 1e-5), (runs.kto, "kl", 1e-6), (runs.rloo, "kl", 1e-6))
]


@pytest.mark.parametrize(("make", "log", "near"), [pytest.param(runs.grpo, "kl", 1e-6, id="grpo"), *SLOW])
def test_an_adapter_on_the_head_of_every_trainer(untied, make, log, near):
    """The reference is the adapter as it was at first: rewards and KL begin at 0, and leave it by the head alone."""
    model = adapted(untied)
    with adapted_head(model):
        trainer = make(untied, model, max_steps=2)
    install(trainer)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lm_head.lora" in name}
    trainer.train()
    first, second = (entry[log] for entry in trainer.state.log_history[:2])
    assert first == pytest.approx(0, abs=near)
    assert abs(second) > 100 * near
    after = dict(model.named_parameters())
    moved = [name for name, p in before.items() if ".ref." not in name and not torch.equal(after[name], p)]
    assert len(moved) == 2


def test_no_adapter_on_the_head(place):
    with pytest.raises(ConfigError, match="none"), adapted_head(AutoModelForCausalLM.from_pretrained(place)):
        pass
