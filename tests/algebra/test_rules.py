"""What a temperature and the rules of sampling may be, of Python's numbers and of NumPy's."""

from fractions import Fraction

import numpy as np
import pytest

from logitless.algebra.rules import is_drawing_temperature, is_temperature


@pytest.mark.parametrize(
    "value", [np.float16(0.5), np.float32(0.5), np.float64(1e26), np.int8(3), Fraction(1, 3), 1e-24]
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
