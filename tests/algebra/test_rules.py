"""What a temperature and the rules of sampling may be, of Python's numbers and of NumPy's."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from logitless.algebra.rules import Rules, is_drawing_temperature, is_temperature
from logitless.errors import OptionError


@pytest.mark.parametrize(
    "value", [np.float16(0.5), np.float32(1e26), np.float64(1e26), np.int8(3), Fraction(1, 3), 1e-24]
)
def test_a_temperature_of_any_kind(value):
    assert is_temperature(value)


@pytest.mark.parametrize(
    "value", [np.float16("inf"), np.float16("nan"), np.float16(-1), 1e-25, 10**400, Fraction(10**400), "1", True]
)
def test_no_temperature(value):
    assert not is_temperature(value)


def test_zero_draws_the_best_entry():
    assert is_drawing_temperature(np.float16(0))
    assert not is_temperature(np.float16(0))


def test_rules_hold_numbers_of_pythons():
    rules = Rules(top_k=np.int64(5), top_p=Fraction(9, 10), min_p=np.float32(0.25))
    assert rules == Rules(5, 0.9, 0.25)
    assert [type(x) for x in (rules.top_k, rules.top_p, rules.min_p)] == [int, float, float]


@pytest.mark.parametrize("top_p", [Fraction(1, 10**400), 10**400, 0, 1.5, True, "1"])
def test_no_top_p(top_p):
    """Nor what is 0 as a float, which would keep no entry."""
    with pytest.raises(OptionError, match="top_p: expected a share"):
        Rules(top_p=top_p)


@pytest.mark.parametrize(
    "top_k",
    [
        torch.tensor(True),
        torch.ones((), dtype=torch.int64, device="meta"),
        True,
        np.bool_(True),
        5.0,
        np.float32(5),
        -1,
        np.int8(-1),
        "5",
        None,
    ],
)
def test_no_top_k(top_k):
    with pytest.raises(OptionError, match="top_k: expected a whole number, 0 for all entries"):
        Rules(top_k=top_k)
