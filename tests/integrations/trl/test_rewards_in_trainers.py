"""The reward inside TRL's own trainers: the exact ids of prompt and completion, and the live policy."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from logitless.integrations.trl.rewards import SelfCertaintyReward
from tests.support.integrations.certainty import dense
from tests.support.workbench.micro import micro_model

TEXT = ["def f(x):\n", "import os, sys, re\n", "a", "class Point:\n    x = 1\n"]
CHAT = [[{"role": "user", "content": text}] for text in TEXT]
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"
TRAINERS = ("GRPO", "RLOO")
# TRL 1.16 asks transformers for names that 5.23 calls old ones.
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning")


class Recorder:
    """A second reward function, which keeps what TRL hands to the first."""

    __name__ = "recorder"

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completion_ids, **_):
        self.calls.append((prompts, completion_ids))
        return [0.0] * len(prompts)


def policy():
    """A micro model that is far from uniform."""
    model = micro_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    return model


def trained(kind, micro, place, prompts, steps=2, rate=0.0, **options):
    """(trainer, recorder) after some steps on completions of at most 6 tokens."""
    import trl

    config = {"GRPO": trl.GRPOConfig, "RLOO": trl.RLOOConfig}[kind]
    trainer_class = {"GRPO": trl.GRPOTrainer, "RLOO": trl.RLOOTrainer}[kind]
    tokenizer = AutoTokenizer.from_pretrained(micro.model.parent)
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = TEMPLATE
    reward, recorder = SelfCertaintyReward(micro_batch=3), Recorder()
    arguments = config(
        output_dir=str(place), per_device_train_batch_size=4, num_generations=2, max_completion_length=6,
        max_steps=steps, learning_rate=rate, temperature=0.8, beta=0.0, logging_steps=1, report_to="none",
        use_cpu=True, bf16=False, activation_checkpointing=False, disable_tqdm=True, save_strategy="no",
        dataloader_pin_memory=False, **options,
    )  # fmt: skip
    trainer = trainer_class(
        model=policy(), reward_funcs=[reward, recorder], args=arguments, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip
    reward.bind(trainer)
    trainer.train()
    return trainer, recorder


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("prompts", [TEXT, CHAT], ids=["text", "chat"])
def test_the_reward_is_of_the_ids_that_the_trainer_sampled(kind, prompts, micro, tmp_path):
    """A learning rate of 0 keeps the policy: the last logged rewards are the dense ones of the recorded ids."""
    trainer, recorder = trained(kind, micro, tmp_path, prompts)
    given, completions = recorder.calls[-1]
    ids = trainer._tokenize_prompts(given)[0]
    wanted = [dense(trainer.model, *row, temperature=0.8) for row in zip(ids, completions, strict=True)]
    assert list(trainer._logs["rewards"]["self_certainty"]) == pytest.approx(wanted, rel=5e-6, abs=2e-6)
    logged = [entry for entry in trainer.state.log_history if "rewards/self_certainty/mean" in entry][-1]
    assert logged["self_certainty/mean"] == pytest.approx(sum(wanted) / len(wanted), rel=5e-6, abs=2e-6)
    assert logged["reward"] == pytest.approx(logged["self_certainty/mean"], rel=1e-5)


def test_the_policy_is_the_live_one(micro, tmp_path):
    """After steps that moved it, the reward of the same ids is the moved policy's."""
    trainer, recorder = trained("GRPO", micro, tmp_path, TEXT, steps=3, rate=1e-2)
    reward = trainer.reward_funcs[0]
    given, completions = recorder.calls[-1]
    ids = trainer._tokenize_prompts(given)[0]
    got = reward(prompts=given, completion_ids=completions)
    rows = list(zip(ids, completions, strict=True))
    assert got == pytest.approx([dense(trainer.model, *row, temperature=0.8) for row in rows], rel=5e-6, abs=2e-6)
    start = [dense(policy(), *row, temperature=0.8) for row in rows]
    assert max(abs(a - b) for a, b in zip(got, start, strict=True)) > 1e-4


def test_self_certainty_rises_under_its_own_reward(micro, tmp_path):
    trainer, _ = trained("GRPO", micro, tmp_path, TEXT, steps=12, rate=5e-3, seed=3)
    seen = [entry["self_certainty/mean"] for entry in trainer.state.log_history if "self_certainty/mean" in entry]
    assert sum(seen[-3:]) / 3 > sum(seen[:3]) / 3
    assert torch.tensor(seen).isfinite().all()
