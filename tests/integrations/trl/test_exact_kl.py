"""GRPO with the exact KL: the root of k3, the loss against the dense KL, and the reference in each of its forms."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from logitless.errors import ConfigError, OptionError
from logitless.integrations.trl.exact_kl import gap
from logitless.integrations.trl.trainers import install, uninstall
from tests.support.integrations.tiny import halved
from tests.support.integrations.trl import runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kl", [1e-14, 1e-9, 1e-4, 0.3, 1.0, 30.0, 1e4])
def test_the_root(kl, dtype):
    x = gap(torch.tensor(kl, dtype=dtype))
    assert x.dtype == torch.float64
    assert (torch.exp(x) - x - 1).item() == pytest.approx(kl, rel=1e-6 if kl > 1e-8 else 0.05, abs=1e-18)
    assert (torch.expm1(x) - x).item() == pytest.approx(kl, rel=1e-6 if kl > 1e-8 else 0.05, abs=1e-18)
    assert torch.autograd.gradcheck(gap, torch.tensor([max(kl, 1e-3)], dtype=torch.float64, requires_grad=True))


def test_no_gap_no_gradient():
    kl = torch.zeros(3, requires_grad=True)
    x = gap(kl)
    x.sum().backward()
    assert x.tolist() == kl.grad.tolist() == [0, 0, 0]


def batch_of(trainer):
    """A batch whose loss is to be computed, with both models moved apart."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    return trainer._prepare_inputs(batch)


def logits(model, batch, temperature):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    return model(ids, attention_mask=mask).logits[:, -width - 1 : -1] / temperature


def dense_kl(z, z_ref):
    p, q = z.log_softmax(-1), z_ref.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def expected(trainer, batch, z_ref):
    """GRPO's loss (dapo, one step old policy) plus beta times the mean of the exact KL, written out densely."""
    z = logits(trainer.model, batch, trainer.temperature)
    mask = batch["completion_mask"]
    logp = z.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    policy = -(logp - logp.detach()).exp() * batch["advantages"][:, None]
    count = batch["num_items_in_batch"].clamp(min=1)
    count = count * trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    return ((policy + trainer.beta * dense_kl(z, z_ref)) * mask).sum() / count


@pytest.fixture
def trainer(place):
    trainer = runs.grpo(place, beta=0.4, loss_type="dapo")
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, exact):
    assert found.keys() == exact.keys() != set()
    for name, g in exact.items():
        torch.testing.assert_close(found[name], g, rtol=1e-3, atol=2e-4 * g.abs().max().item() + 1e-7)


def test_loss_and_gradient_are_those_of_the_exact_kl(trainer):
    install(trainer, exact_kl=True)
    batch = batch_of(trainer)
    given = dict(batch)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    found = grads(trainer.model)
    trainer.model.zero_grad()
    with torch.no_grad():
        z_ref = logits(trainer.ref_model, batch, trainer.temperature)
    exact = expected(trainer, batch, z_ref)
    exact.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-4)
    assert_close(found, grads(trainer.model))
    assert batch.keys() == given.keys()
    assert all(batch[name] is given[name] for name in batch)
    mask = batch["completion_mask"]
    kl = (dense_kl(logits(trainer.model, batch, trainer.temperature), z_ref) * mask).sum() / mask.sum()
    assert trainer._metrics["train"]["kl"][-1] == pytest.approx(kl.item(), rel=1e-4)


def test_it_is_not_the_sampled_kl(trainer):
    install(trainer)
    torch.manual_seed(1)
    batch = batch_of(trainer)
    sampled = trainer.compute_loss(trainer.model, batch).item()
    install(trainer, exact_kl=True)
    assert abs(trainer.compute_loss(trainer.model, batch).item() - sampled) > 1e-3


def adapted(place):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(place), config)


@pytest.mark.parametrize("adapters", [False, True])
def test_no_reference_is_run_before_the_loss(untied, adapters, monkeypatch):
    trainer = runs.grpo(untied, adapted(untied) if adapters else None, beta=0.4)
    forward = trainer.ref_model and trainer.ref_model.forward
    install(trainer, exact_kl=True)
    assert (trainer.ref_model and trainer.ref_model.forward) == forward  # nobody scores with it
    scored, score = [], trainer._get_per_token_logps_and_entropies

    def scores(*args, **kwargs):
        scored.append(args)
        return score(*args, **kwargs)

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", scores)
    batch = batch_of(trainer)
    assert not scored
    assert "ref_per_token_logps" not in batch
    assert trainer.beta == 0.4
    uninstall(trainer)  # TRL's own loss wants the reference's log-probs
    assert trainer._buffered_inputs is None
    assert "ref_per_token_logps" in batch_of(trainer)
    assert len(scored) == 1


@pytest.mark.slow
def test_the_reference_is_the_policy_without_its_adapter(untied):
    trainer = runs.grpo(untied, adapted(untied), beta=0.4, loss_type="dapo")
    trainer.current_gradient_accumulation_steps = 1
    install(trainer, exact_kl=True)
    batch = batch_of(trainer)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    found = grads(trainer.model)
    trainer.model.zero_grad()
    from trl.trainer.utils import use_adapter

    with torch.no_grad(), use_adapter(trainer.model, "ref" if "ref" in trainer.model.peft_config else None):
        z_ref = logits(trainer.model, batch, trainer.temperature)
    exact = expected(trainer, batch, z_ref)
    exact.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-4)
    assert_close(found, grads(trainer.model))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"loss_type": "grpo"}, {"use_bias_correction_kl": True}, {"entropy_coef": 0.1}])
def test_it_trains(place, changes):
    trainer = runs.grpo(place, beta=0.2, num_iterations=2, **changes)
    install(trainer, exact_kl=True)
    trainer.train()
    assert all(0 <= entry["kl"] < 50 for entry in trainer.state.log_history if "kl" in entry)


@pytest.mark.slow
def test_policy_and_reference_round_alike(place):
    """Under bf16 autocast, with both models alike, the KL is 0 and the gradient that of the policy loss."""
    trainer = runs.grpo(place, bf16=True, max_steps=1)
    install(trainer, exact_kl=True)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-9)


def test_where_there_is_no_such_penalty(place):
    with pytest.raises(OptionError, match="GRPO"):
        install(runs.sft(place), exact_kl=True)
    with pytest.raises(OptionError, match="beta"):
        install(runs.grpo(place, beta=0.0), exact_kl=True)


@pytest.mark.parametrize("sharded", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_a_sharded_reference_is_refused(trainer, sharded):
    setattr(trainer, sharded, True)
    before = dict(vars(trainer)), dict(vars(trainer.model))
    with pytest.raises(ConfigError, match="exact_kl: expected a reference model that is whole on every rank") as caught:
        install(trainer, exact_kl=True)
    assert "\n" not in str(caught.value)
    assert (dict(vars(trainer)), dict(vars(trainer.model))) == before


def test_a_reference_that_changes_its_logits_in_a_way_of_its_own_is_refused(trainer):
    halved(trainer.ref_model)
    install(trainer, exact_kl=True)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM changes its logits otherwise than by scale 1"):
        trainer.compute_loss(trainer.model, batch_of(trainer))


def test_adapters_on_a_model_that_changes_its_logits_in_a_way_of_its_own_are_refused(untied):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = runs.grpo(untied, get_peft_model(AutoModelForCausalLM.from_pretrained(untied), config))
    halved(trainer.model.get_base_model())
    install(trainer, exact_kl=True)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM changes its logits otherwise than by scale 1"):
        trainer.compute_loss(trainer.model, batch_of(trainer))


def test_a_soft_prompt_is_refused(untied):
    """The reference would be handed the policy's own virtual tokens, and the KL be 0 for ever."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = runs.grpo(untied, get_peft_model(AutoModelForCausalLM.from_pretrained(untied), config))
    with pytest.raises(ConfigError, match="exact_kl: expected a reference that reads what the policy reads"):
        install(trainer, exact_kl=True)
    install(trainer)


def test_a_loss_of_ones_own_is_not_replaced(place):
    from trl import GRPOTrainer

    class Mine(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return 2 * super()._compute_loss(model, inputs)

    make = partial(runs.grpo, place, trainer=Mine)
    with pytest.raises(ConfigError, match="Mine has a loss of its own"):
        install(make(), exact_kl=True)
    trainer = make()
    install(trainer)
    assert vars(trainer.model)["forward"]
