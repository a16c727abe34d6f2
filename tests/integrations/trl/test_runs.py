"""Each trainer trains a few steps both ways: as TRL has it and on the pass. Logs, gradients, parameters are equal."""

import math
from functools import partial

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from logitless.integrations.trl.trainers import install
from tests.support.integrations.trl import runs
from tests.support.integrations.trl.runs import assert_same, assert_same_training, run


def squared(outputs, labels, num_items_in_batch=None):
    """A loss that looks at the logits."""
    return outputs.logits.float().square().mean()


FAST = {
    "sft": runs.sft,
    "dpo": runs.dpo,
    "kto": runs.kto,
    "grpo": runs.grpo,
    "rloo": runs.rloo,
    "distillation": runs.distillation,
}
SLOW = {
    "sft, dft": partial(runs.sft, loss_type="dft"),
    "sft, padding-free": partial(runs.sft, padding_free=True, max_length=None),
    "sft, accumulated": partial(runs.sft, gradient_accumulation_steps=2, per_device_train_batch_size=2),
    "sft, checkpointed": partial(runs.sft, gradient_checkpointing=True),
    "sft, smoothed": partial(runs.sft, label_smoothing_factor=0.1),
    "sft, a loss of the caller's": partial(runs.sft, trainer={"compute_loss_func": squared}),
    "dpo, wpo": partial(runs.dpo, use_weighting=True),
    "dpo, several losses": partial(runs.dpo, loss_type=["sigmoid", "sft", "ipo"], loss_weights=[1.0, 0.5, 0.1]),
    "dpo, precomputed": partial(runs.dpo, precompute_ref_log_probs=True),
    "kto, apo": partial(runs.kto, loss_type="apo_zero_unpaired"),
    "grpo, entropy bonus": partial(runs.grpo, entropy_coef=0.05),
    "grpo, no kl": partial(runs.grpo, beta=0.0),
    "grpo, fp32 head": partial(runs.grpo, cast_lm_head_to_fp32=True),
    "grpo, two iterations": partial(runs.grpo, num_iterations=2, loss_type="grpo"),
    "rloo, no kl": partial(runs.rloo, beta=0.0),
    "distillation, forward": partial(runs.distillation, beta=0.0),
    "distillation, jsd": partial(runs.distillation, beta=0.3),
}


@pytest.mark.parametrize("name", FAST)
def test_the_same_training(place, name):
    assert_same_training(partial(FAST[name], place, max_steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_same_training_with_options(place, name):
    make = partial(SLOW[name], place)
    # where policy and reference are the same model, which of two zeros is larger is rounding
    rounding = ("rewards/accuracies",) if "precomputed" in name else ()
    assert_same_training(make, except_for=rounding)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_the_same_training_of_a_head_of_its_own(untied, name):
    assert_same_training(partial(FAST[name], untied))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_the_same_training_of_an_adapter(untied, name):
    """The head is frozen, and the reference is the policy with its adapters off."""

    def make():
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(untied), config)
        return FAST[name](untied, model)

    assert_same_training(make)


@pytest.mark.slow
def test_the_same_training_of_a_soft_prompt(untied):
    """PEFT puts virtual tokens before the ids, and pads the labels."""

    def make():
        torch.manual_seed(4)
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return runs.sft(untied, get_peft_model(AutoModelForCausalLM.from_pretrained(untied), config))

    assert_same_training(make)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at its input
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # and does so itself
def test_the_same_training_compiled(place):
    """dynamo follows the model and breaks its graph at the pass."""
    compiled = run(partial(runs.sft, place, torch_compile=True, torch_compile_backend="eager"), ours=True)
    for part in (compiled.gradients, compiled.parameters):
        for key in list(part):
            part[key.removeprefix("_orig_mod.")] = part.pop(key)
    assert_same(compiled, run(partial(runs.sft, place), ours=False))


@pytest.mark.slow
def test_policy_and_reference_round_alike(place):
    """Under bf16 autocast a policy that is its reference has no log-ratio, so that DPO's loss is log 2."""
    trainer = runs.dpo(place, bf16=True, max_steps=1, per_device_train_batch_size=6)
    install(trainer)
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)


def test_outputs_asked_for_have_logits(place):
    """TRL recomputes them with the model's own forward."""
    trainer = runs.sft(place)
    install(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    with pytest.warns(FutureWarning, match="return_outputs"):
        loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    width = batch["input_ids"].shape
    assert outputs.logits.shape[:2] == width
    torch.testing.assert_close(loss, trainer.model(**batch).loss, rtol=1e-4, atol=1e-6)


def test_evaluation(place):
    """One product, no graph: the same loss and metrics."""
    found = []
    for ours in (True, False):
        trainer = runs.sft(place)
        if ours:
            install(trainer, metrics=False)
        found.append(trainer.evaluate(trainer.train_dataset))
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)
