"""The two methods that keep every distribution whole: their gradient, bytes and refusal."""

import dataclasses

import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from logitless.algebra.costs import whole_rollout_bytes
from logitless.errors import OptionError
from logitless.models.instances import with_adapters
from logitless.workbench.grade import legacy
from logitless.workbench.grade.config import METHODS_COMPARED, GradeConfig
from logitless.workbench.grade.data import batch_of
from logitless.workbench.grade.method import Task
from logitless.workbench.grade.methods import METHODS, method_of
from logitless.workbench.grade.models import SoftReward
from tests.support.workbench.micro import SHAPE, micro_model

V, STEPS = SHAPE["vocab_size"], 6


def task_of(method: str, **options) -> Task:
    """A policy some steps away from its reference, in fp32."""
    model = with_adapters(micro_model(initializer_range=0.2), 4).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    config = micro_model().config
    config.num_labels, config.initializer_range, config.pad_token_id = 2, 0.3, 0
    reward = SoftReward.of(Qwen3ForSequenceClassification(config), V, 1)
    options = {"method": method, "completion_length": STEPS, "prompt_length": 4, "top_k": V, "beta": 0.3} | options
    return Task(GradeConfig(**options), model, None, reward, V, 2)


def gradient(task: Task) -> tuple[torch.Tensor, list[float], list[float]]:
    batch = batch_of([[5, 6, 7], [8, 9]], torch.tensor([4, 5]), 0, 12, torch.device("cpu"))
    outcome = method_of(task).backward(batch, 0.8, share=0.5)
    found = torch.cat([p.grad.flatten() for p in task.model.parameters() if p.grad is not None])
    return found, outcome.rewards, outcome.kls


@pytest.mark.parametrize("method", ["ste", "gumbel"])
@pytest.mark.parametrize("top_k", [V, 0])
def test_all_entries_give_what_the_legacy_gives(method, top_k):
    exact, rewards, kls = gradient(task_of(f"{method}_legacy"))
    found, ours, our_kls = gradient(task_of(method, top_k=top_k))
    assert min(kls) > 0.01
    assert ours == pytest.approx(rewards, rel=1e-5)
    assert our_kls == pytest.approx(kls, rel=1e-4)
    assert float((found - exact).norm() / exact.norm()) < 2e-5
    fewer, *_ = gradient(task_of(method, top_k=20))
    assert float((fewer - exact).norm() / exact.norm()) > 1e-3


def test_the_kl_is_in_the_loss():
    """The gradient without it is another one (a widely copied implementation logs the KL, and forgets it there)."""
    for method in ("ste", "ste_legacy"):
        exact, *_ = gradient(task_of(method))
        without, *_ = gradient(task_of(method, beta=0.0))
        assert float((exact - without).norm() / exact.norm()) > 0.05


def test_a_batch_needs_what_each_position_keeps():
    """Counted of few positions, as of many."""
    policy = task_of("ste").readers()[0]
    each = (legacy._kept_bytes(policy, 96) - legacy._kept_bytes(policy, 32)) // 64
    need, less = (whole_rollout_bytes(2, STEPS, V, prompt=4, position_bytes=x) for x in (each, each * 0.9))
    assert need - less > 0.02 * need
    assert legacy.rollout_bytes(policy, 2, 4, STEPS) == pytest.approx(need, rel=0.02)


def test_every_method_has_its_name_in_the_options():
    assert set(METHODS) == set(METHODS_COMPARED)


def test_what_would_not_fit_is_refused_before_it_runs(monkeypatch):
    task = task_of("ste_legacy")
    need = METHODS["ste_legacy"].vocabulary_bytes(task.config, V)
    assert need == 12 * STEPS * V * 4
    assert METHODS["ste"].vocabulary_bytes(task.config, V) == 0
    monkeypatch.setattr(legacy, "free_bytes", lambda device: need)
    with pytest.raises(OptionError, match=r"--method ste_legacy: a batch needs .* use --method ste, or a smaller"):
        method_of(task)
    method_of(dataclasses.replace(task, config=dataclasses.replace(task.config, method="ste")))
