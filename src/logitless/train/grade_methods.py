"""The methods of alignment on soft tokens, by name."""

from __future__ import annotations

from .grade_score import Reinforce
from .grade_soft import Gumbel, StraightThrough
from .grade_step import Method, Task

METHODS: dict[str, type[Method]] = {
    "ste": StraightThrough,
    "gumbel": Gumbel,
    "reinforce": Reinforce,
}


def method_of(task: Task) -> Method:
    """The configured method, for a new run."""
    return METHODS[task.config.method](task)
