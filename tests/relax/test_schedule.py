"""Temperatures over a run: where they start, where they end, and in between."""

from itertools import pairwise

import pytest

from logitless import relax
from logitless.errors import OptionError
from tests.support.vocab.refusing import refused


@pytest.mark.parametrize(("shape", "middle"), [("linear", 1.25), ("exponential", 1.0), ("cosine", 1.25)])
def test_from_start_to_end(shape, middle):
    path = [relax.anneal(step, 101, shape=shape) for step in range(101)]
    assert path[0] == 2.0
    assert path[100] == pytest.approx(0.5, rel=1e-12)
    assert path[50] == pytest.approx(middle, rel=1e-12)
    assert all(a > b for a, b in pairwise(path))
    assert relax.anneal(10**6, 101, shape=shape) == path[100]


def test_a_quarter_of_the_way():
    quarter = [relax.anneal(25, 101, shape=shape) for shape in ("linear", "exponential", "cosine")]
    assert quarter == pytest.approx([1.625, 2.0 * 0.25**0.25, 0.5 + 1.5 * (1 + 0.5**0.5) / 2])


def test_one_step_and_a_rising_temperature():
    assert relax.anneal(0, 1) == 2.0
    assert relax.anneal(3, 4, start=0.5, end=1.0) == 1.0


@pytest.mark.parametrize("shape", ["linear", "exponential", "cosine"])
@pytest.mark.parametrize("end", [0.1, 1e-4, 1e-20])
def test_the_last_step_is_exactly_at_the_end(shape, end):
    """Also where the end is less than the start's rounding, which left 0."""
    for start in (2.0, 3.0):
        assert relax.anneal(9, 10, start, end, shape) == end
        assert relax.anneal(0, 10, start, end, shape) == start


@pytest.mark.parametrize("shape", ["linear", "exponential", "cosine"])
def test_a_temperature_that_stays_is_the_same_at_each_step(shape):
    """Also the lowest that sampling takes, below which it refuses to go on."""
    for tau in (0.1, 0.7, 1e-24):
        assert {relax.anneal(step, 100, tau, tau, shape) for step in range(100)} == {tau}


def test_what_is_refused():
    refused(OptionError, lambda: relax.anneal(0, 10, shape="step"), "linear, exponential, cosine", "'step'")
    refused(OptionError, lambda: relax.anneal(-1, 10), "step: expected a whole number of at least 0", "got -1")
    for steps in (0, 1.5, float("nan"), True):
        refused(
            OptionError, lambda n=steps: relax.anneal(0, n), "steps: expected a whole", "at least 1", f"got {steps}"
        )
    for end in (0.0, -1.0, float("nan"), float("inf"), 10**400, "1"):
        refused(OptionError, lambda end=end: relax.anneal(0, 10, end=end), "end: expected a positive temperature")
