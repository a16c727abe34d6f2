"""Sums from which an evaluation's curves are drawn, at numbers that can be told by hand."""

import numpy as np
import pytest

from logitless.workbench.evaluation.curves import Calibration, Spectrum


@pytest.mark.parametrize(
    ("wrong", "right", "expected"), [([1, 3], [3, 3], 0.75), ([2], [2], 0.5), ([1], [2, 0], 0.5), ([], [1], None)]
)
def test_numbers_that_are_alike_count_for_a_half(wrong, right, expected):
    found = Spectrum()
    found.add(np.array([*wrong, *right], dtype=float), np.array([False] * len(wrong) + [True] * len(right)))
    assert found.auroc() == expected


def test_the_most_of_all_is_exact_and_others_a_mean_of_those_alike():
    found = Spectrum()
    found.add(np.array([1.0, 4.0, 4.001, 4.002]), np.array([True, False, True, True]))
    assert found.quantile(1) == pytest.approx(4.002, rel=1e-6)
    assert found.quantile(0.25) == 1.0
    assert found.quantile(0.5) == found.quantile(0.99) == pytest.approx(4.001, rel=1e-6)


def test_batches_of_any_size_weigh_by_their_tokens():
    """The error is that of all tokens at once, and a probability of 1 is within the last interval."""
    confidence, right = np.array([0.1, 0.15, 0.9, 1.0, 1.0]), np.array([True, False, True, False, True])
    once, parts = Calibration(5), Calibration(5)
    once.add(confidence, right)
    for part in (slice(0, 4), slice(4, 5)):
        parts.add(confidence[part], right[part])
    expected = (abs(1 - 0.25) + abs(2 - 2.9)) / 5
    assert parts.summary() == once.summary()
    assert once.summary()["expected_calibration_error"] == pytest.approx(expected)
    assert [(x["from"], x["to"], x["tokens"]) for x in once.summary()["bins"]] == [(0.0, 0.2, 2), (0.8, 1.0, 3)]
