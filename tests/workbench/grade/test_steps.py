"""One step of a run: the prompts that it takes, and what it reports of its parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitless.workbench.grade import steps
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.grade.method import Outcome


def test_steps_take_prompt_after_prompt_and_report_means_over_their_parts():
    seen: list[Any] = []

    def taken(batches: list[Any], tau: float, apply: object) -> list[Outcome]:
        seen.extend(batches)
        state.norms.extend([0.5, 1.5])  # of a method that moves twice
        return [Outcome([0.0, 1.0], [2.0, 4.0], 0.5), Outcome([0.5, 0.9], [6.0, 8.0], 1.0)]

    prompts = [[i] for i in range(6)]
    state: Any = SimpleNamespace(
        config=GradeConfig(batch_size=2, gradient_accumulation_steps=2, max_steps=3),
        step=0,
        norms=[9.0],
        prompts={"train": prompts},
        batch=lambda chosen, *key: (chosen, key),
        method=SimpleNamespace(step=taken),
        apply=None,
        task=SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu"))),
    )
    found = [steps._step(state) for _ in range(3)]
    assert [key for _, key in seen] == [("train", step, part) for step in range(3) for part in range(2)]
    order = [ids for chosen, _ in seen for ids in chosen]
    assert sorted(order[:6]) == prompts != order[:6]
    assert order[6:] == order[:6]
    assert [(x["step"], x["tau"]) for x in found] == [(1, 2.0), (2, 1.25), (3, 0.5)]
    for one in found:
        assert {name: one[name] for name in ("train/reward", "train/kl", "grad_norm", "clipped", "coverage")} == {
            "train/reward": pytest.approx(0.6),
            "train/kl": 5.0,
            "grad_norm": 1.0,
            "clipped": True,
            "coverage": 0.75,
        }


@pytest.mark.parametrize(("split", "name"), [("validation", "val"), ("test", "test")])
def test_an_evaluation_is_of_all_prompts_each_batch_with_noise_of_its_own(monkeypatch, split, name):
    monkeypatch.setattr(steps, "evaluate", lambda task, batches: {"seen": list(batches)})
    prompts = [[i] for i in range(33)]
    state: Any = SimpleNamespace(task=None, prompts={split: prompts}, batch=lambda chosen, *key: (chosen, key))
    batches = [(prompts[:32], (split, 0)), (prompts[32:], (split, 32))]
    assert steps.evaluation(state, split) == {f"{name}/seen": batches}
