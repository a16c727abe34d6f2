"""How the temperature of a relaxation falls over a run."""

from __future__ import annotations

import math

from ..algebra.options import is_number, whole_from
from ..errors import OptionError

SHAPES = ("linear", "exponential", "cosine")


def anneal(step: int, steps: int, start: float = 2.0, end: float = 0.5, shape: str = "linear") -> float:
    """The temperature at a step of a run: `start` at step 0, `end` at step `steps - 1` and after it.

        f = min(1, step / (steps - 1))
        linear = start + (end - start) * f
        exponential = start * (end / start) ** f
        cosine = end + (start - end) * (1 + math.cos(math.pi * f)) / 2

    Raises OptionError. Jang, Gu and Poole, "Categorical Reparameterization with Gumbel-Softmax", arXiv 1611.01144,
    anneal exponentially; GRADE, arXiv 2601.11574, linearly from 2.0 to 0.5.
    """
    if shape not in SHAPES:
        raise OptionError(f"shape: expected one of {', '.join(SHAPES)}, got {shape!r}")
    step, steps = whole_from("step", step, 0), whole_from("steps", steps, 1)
    for name, value in (("start", start), ("end", end)):
        if not is_number(value) or not 0 < value < math.inf:
            raise OptionError(f"{name}: expected a positive temperature, got {value!r}")
    f = min(1.0, step / max(1, steps - 1))
    if f == 1:  # exactly, which the sums below would round
        return end
    if shape == "exponential":
        return start * (end / start) ** f
    if shape == "cosine":
        f = (1 - math.cos(math.pi * f)) / 2
    return start + (end - start) * f
