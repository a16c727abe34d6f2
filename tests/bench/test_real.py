"""The benchmarks on real models: what they make of a model's numbers."""

import pytest
import torch

from bench.real.statistics import calibration, quantiles
from bench.real.text import FILES, texts


def test_calibration_is_the_mean_distance_of_what_is_said_and_what_comes_true():
    sure = torch.tensor([0.95, 0.99, 0.97, 1.0, 0.1, 0.12])
    right = torch.tensor([True, True, True, False, False, True])
    error, bins = calibration(sure, right)
    assert [count for count, *_ in bins] == [2, 4]
    assert error == pytest.approx(2 / 6 * abs(0.11 - 0.5) + 4 / 6 * abs(0.9775 - 0.75))
    assert calibration(torch.ones(3), torch.ones(3, dtype=torch.bool))[0] == 0


def test_quantiles_by_their_share():
    found = quantiles(torch.arange(101))
    assert (found["10%"], found["50%"], found["99%"]) == (10, 50, 99)


@pytest.mark.parametrize("kind", FILES)
def test_texts_begin_with_the_longest(kind):
    found = [len(text) for text in texts(kind)]
    assert len(found) > 20
    assert found == sorted(found, reverse=True)
