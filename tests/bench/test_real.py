"""The benchmarks on real models: what they make of a model's numbers."""

from types import SimpleNamespace

import pytest
import torch

import logitless as ll
from bench.real import stored
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


def test_what_storing_loses_is_the_dense_divergence():
    hidden, weight = torch.randn(30, 16), torch.randn(90, 16)
    reading = SimpleNamespace(hidden=hidden, head=ll.LMHead(weight), labels=torch.zeros(30, dtype=torch.long))
    found = {record["stored"]: record for record in stored.measure(reading)}
    p = (hidden @ weight.T).log_softmax(-1)
    q = (hidden.bfloat16().float() @ weight.T).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    assert found["bfloat16"]["kl"]["largest"] == pytest.approx(kl.max().item(), rel=0.02)
    assert found["fp8"]["kl"]["mean"] > 10 * found["bfloat16"]["kl"]["mean"]
    assert [found[name]["bytes"] for name in ("bfloat16", "fp8", "best 10")] == [32, 20, 80]
    left = 1 - p.exp().topk(10).values.sum(-1)
    assert found["best 10"]["left"]["mean"] == pytest.approx(left.mean().item(), rel=0.01)
