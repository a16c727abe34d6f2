"""SFT's evaluation: its metrics against dense logits of the same rows, and no logits gathered."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from logitless.errors import ConfigError, OptionError
from logitless.integrations.trl.trainers import install, uninstall
from tests.support.allocations import largest_allocation
from tests.support.integrations.trl.runs import TEXTS, dpo, sft

NAMES = ("perplexity", "accuracy", "top_5_accuracy", "entropy")


@pytest.fixture
def trainer(place):
    rows = [{"prompt": text[:4], "completion": text[4:]} for text in TEXTS]
    made = sft(place, trainer={"eval_dataset": Dataset.from_list(rows)}, per_device_eval_batch_size=4)
    install(made)
    return made


def dense(trainer) -> dict[str, float]:
    """What float64 logits of each row by itself say of the labels that count."""
    nats, ranks, entropies = [], [], []
    model = trainer.model.double().eval()
    for batch in trainer.get_eval_dataloader():
        with torch.no_grad():
            z = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].log_softmax(-1)
        labels = batch["labels"][:, 1:]
        z, labels = z[labels != -100], labels[labels != -100]
        own = z.gather(-1, labels[:, None])
        nats += (-own[:, 0]).tolist()
        ranks += (1 + (z > own).sum(-1)).tolist()
        entropies += (-(z.exp() * z).sum(-1)).tolist()
    model.float()
    rank = np.array(ranks)
    values = math.exp(np.mean(nats)), (rank == 1).mean(), (rank <= 5).mean(), np.mean(entropies)
    return dict(zip(NAMES, map(float, values), strict=True))


def test_metrics_are_those_of_the_logits(trainer):
    expected = dense(trainer)
    found = trainer.evaluate()
    assert {name: found[f"eval_{name}"] for name in NAMES} == pytest.approx(expected, rel=1e-5)
    predicted = trainer.predict(trainer.eval_dataset)
    assert {name: predicted.metrics[f"test_{name}"] for name in NAMES} == pytest.approx(expected, rel=1e-5)
    assert predicted.predictions["rank"].shape == predicted.label_ids.shape
    assert (predicted.predictions["rank"] == 1).sum() / (predicted.predictions["rank"] > 0).sum() == pytest.approx(
        expected["accuracy"]
    )


def test_a_soft_prompt_is_no_token(untied):
    """PEFT puts virtual tokens before the ids, and labels of them that do not count: predictions have none."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(untied), config)
    rows = Dataset.from_list([{"prompt": text[:4], "completion": text[4:]} for text in TEXTS])
    made = sft(untied, tuned, trainer={"eval_dataset": rows}, per_device_eval_batch_size=len(TEXTS))
    install(made)
    predicted = made.predict(made.eval_dataset)
    assert ((predicted.predictions["rank"] > 0) == (predicted.label_ids != -100)).all()
    (batch,) = made.get_eval_dataloader()
    with torch.no_grad():
        z = tuned(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 3:-1].log_softmax(-1)
    valid = batch["labels"] != -100
    expected = z.gather(-1, batch["labels"][:, 1:, None].clamp(min=0))[..., 0][valid[:, 1:]]
    assert predicted.predictions["logprob"][valid.numpy()] == pytest.approx(expected.numpy(), rel=1e-4)


def test_a_metric_that_wants_logits_says_what_to_ask_for(trainer):
    trainer.compute_metrics = lambda seen: {"best": seen.predictions.argmax(-1)}
    with pytest.raises(ConfigError, match=r"asks for logits.*: ask for predictions\['logprob'\]"):
        trainer.evaluate()


def test_no_logits_exist(place):
    """Of a batch of 6 rows, in evaluate and predict; those that TRL makes do show."""
    rows = [{"prompt": text[:4], "completion": text[4:] * 8} for text in TEXTS]
    made = sft(place, trainer={"eval_dataset": Dataset.from_list(rows)}, per_device_eval_batch_size=6)
    made.compute_metrics = lambda seen: {"right": float((seen.predictions["rank"] == 1).sum())}
    install(made, memory_budget=2**17)
    logits = 4 * next(iter(made.get_eval_dataloader()))["input_ids"].numel() * made.model.config.vocab_size
    found = {}
    assert largest_allocation(lambda: found.update(made.evaluate())) <= logits / 2
    assert found["eval_right"] > 0
    assert largest_allocation(lambda: made.predict(made.eval_dataset)) <= logits / 2
    install(made, memory_budget=2**17, metrics=False)
    made.compute_metrics = None
    with pytest.warns(FutureWarning, match="return_outputs"):
        assert largest_allocation(lambda: made.predict(made.eval_dataset)) >= logits


def test_taken_back_and_only_of_sft(trainer, place):
    install(trainer, metrics=False)
    assert "eval_perplexity" not in trainer.evaluate()
    install(trainer)
    uninstall(trainer)
    assert "eval_perplexity" not in trainer.evaluate()
    install(dpo(place))
    with pytest.raises(OptionError, match="metrics: expected an SFTTrainer, got a DPOTrainer"):
        install(dpo(place), metrics=True)
