"""What a batch came to, and what many do."""

from statistics import stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitless.workbench.grade.method import Outcome, evaluate


def rollout(coverage: list[list[float]], alive: list[list[bool]], kl: list[list[float]]) -> Any:
    tensors = torch.tensor(coverage), torch.tensor(alive), torch.tensor(kl)
    return SimpleNamespace(soft=SimpleNamespace(coverage=tensors[0]), alive=tensors[1], kl=tensors[2])


def test_coverage_is_of_tokens_before_the_end():
    found = rollout([[0.5, 0.7], [0.9, 0.0]], [[True, True], [True, False]], [[0.0, 0.0]])
    outcome = Outcome.of(found, torch.tensor([0.25, 0.75]), torch.tensor([1.0, 2.0]))
    assert (outcome.rewards, outcome.kls) == ([0.25, 0.75], [1.0, 2.0])
    assert outcome.coverage == pytest.approx(0.7)


@pytest.mark.parametrize("rewards", [[[0.25, 0.5], [1.0]], [[0.5]], [[0.25, 0.75]]])
def test_an_evaluation_is_of_all_samples(rewards):
    """Of one sample there is no deviation."""
    given, covered = iter(rewards), iter([0.5, 0.8])
    task: Any = SimpleNamespace(
        readers=lambda: (None, None),
        sampling=lambda: None,
        generate=lambda policy, n, *_: rollout([[next(covered)]] * n, [[True]] * n, [[1.0, 2.0]] * n),
        reward=lambda soft, alive: torch.tensor(next(given)),
    )
    every = [x for some in rewards for x in some]
    assert evaluate(task, [len(some) for some in rewards]) == {
        "reward_mean": pytest.approx(sum(every) / len(every)),
        "reward_std": pytest.approx(stdev(every)) if len(every) > 1 else 0.0,
        "kl": pytest.approx(3.0),
        "coverage": pytest.approx(0.6 if len(rewards) > 1 else 0.5),  # the second batch is half as large
        "samples": len(every),
    }
