"""One step of a run: the prompts that it takes, what it reports of its parts, and what all steps come to."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from logitless.workbench.grade import single, steps
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


def test_what_steps_come_to_is_of_all_of_them_but_the_reward_of_their_last_tenth():
    looks = {0: {"grad_variance": 3.0, "grad_mean_square": 0.5}, 20: {"grad_variance": 2.0, "grad_mean_square": 0.25}}
    taken = [
        {
            "step": i,
            "train/reward": i,
            "train/kl": 2 * i,
            "seconds": 1.0,
            "coverage": i / 20,
            "peak_memory_bytes": i % 9,
        }
        for i in range(1, 21)
    ]
    assert single._trained([looks[0], *taken[:-1], taken[-1] | looks[20]]) == {
        "train_reward": 19.5,
        "training": {"reward": 10.5, "kl": 21.0},
        "grad_variances": [3.0, 2.0],
        "grad_mean_squares": [0.5, 0.25],
        "seconds_per_step": 1.0,
        "training_seconds": 20.0,
        "peak_memory_bytes": 8,
        "coverage": pytest.approx(0.525),
    }
    assert single._trained(taken[:3])["train_reward"] == 3


def test_what_a_run_came_to_in_a_few_lines(tmp_path):
    after = {"val/reward_mean": 0.5, "val/coverage": 0.1, "val/kl": 9.0}
    after |= {"test/reward_mean": 0.625, "test/reward_std": 0.25, "test/samples": 1, "test/kl": 1.5}
    summary = {
        "method": "ste",
        "model": "m",
        "steps": 1,
        "seconds_per_step": 2.0,
        "before": {"val/reward_mean": 0.25},
        "after": after,
        "train_reward": 0.75,
        "training": {"reward": 0.125},
        "coverage": 0.875,
        "memory_bytes": 1 << 20,
        "peak_memory_bytes": 3 << 20,
        "output_dir": str(tmp_path),
    }
    console = Console(file=io.StringIO(), width=200)
    single.show(summary, console)
    assert console.file.getvalue().splitlines() == [
        "ste on m, 1 step of 2.0 s",
        "validation reward: 0.250 → 0.500",
        "test reward: 0.625, standard deviation 0.250 over 1 sample (in training 0.750); KL 1.50 nats per continuation",
        "soft tokens cover 87.5% of the probability",
        "memory: 1.00 MiB for a batch's gradient, beside weights and gradients; "
        "3.00 MiB at the peak, the whole process",
        f"in {tmp_path}",
    ]
    assert single._memory(summary | {"memory_bytes": None}) == "3.00 MiB at the peak, the whole process"
