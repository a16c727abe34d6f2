"""The methods of alignment on soft tokens, by name."""

from __future__ import annotations

from .grade_legacy import GumbelLegacy, StraightThroughLegacy
from .grade_ppo import PPO
from .grade_score import Reinforce
from .grade_soft import Gumbel, StraightThrough
from .grade_step import Method, Task

METHODS: dict[str, type[Method]] = {
    "ste": StraightThrough,
    "gumbel": Gumbel,
    "reinforce": Reinforce,
    "ppo": PPO,
    "gumbel_legacy": GumbelLegacy,
    "ste_legacy": StraightThroughLegacy,
}


def method_of(task: Task) -> Method:
    """The configured method, for a new run."""
    return METHODS[task.config.method](task)
