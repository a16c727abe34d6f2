"""What is kept of whole rows without a sort, against the same by a sort."""

import math

import pytest
import torch

from logitless.sample.rules import Rules

V = 9_001
RULES = [
    {"top_p": 1e-9}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 1 - 2**-53}, {"min_p": 0.01}, {"min_p": 1.0},
    {"top_p": 0.9, "min_p": 1e-3}, {"top_p": 0.5, "min_p": 1e-6}, {"top_k": 700}, {"top_k": 700, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 1e-3, "order": "vllm"}, {"top_p": 0.5, "min_p": 1e-6, "order": "vllm"},
    {"top_k": 700, "top_p": 0.9, "min_p": 1e-3, "order": "vllm"},
]  # fmt: skip
ROWS = {
    "flat": lambda: torch.randn(V),
    "peaked": lambda: 9 * torch.randn(V),
    "equal ones": lambda: (4 * torch.randn(V)).round() / 2,
    "all equal": lambda: torch.zeros(V),
    "some forbidden": lambda: torch.where(torch.rand(V) < 0.9, -math.inf, torch.randn(V)),
    "two": lambda: torch.full((V,), -math.inf).index_fill_(0, torch.tensor([5, 77]), 3.0),
    "one": lambda: torch.full((V,), -math.inf).index_fill_(0, torch.tensor(77), 3.0),
    "far": lambda: torch.tensor([0.0, -800.0, -2000.0]).repeat(V // 3 + 1)[:V],
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_first_of_the_sorted_row(row, rules):
    x = row().double()
    x = x - x.max()
    total = x.logsumexp(0)
    values, order = x.sort(descending=True, stable=True)
    expected = int(Rules(**rules).prefix(values[None], total[None]))
    kept = Rules(**rules).kept(x, total)
    assert int(kept.count) == expected == int(kept.entries.sum())
    assert kept.entries[order[:expected]].all()
    mass = values[:expected].logsumexp(0) - total
    torch.testing.assert_close(kept.log_mass, mass, rtol=1e-12, atol=1e-12)


def test_in_fp32_shares_are_right_to_its_rounding():
    x = 2.5 * torch.randn(131_072)
    x -= x.max()
    kept = Rules(top_p=0.95).kept(x, x.logsumexp(0))
    exact = Rules(top_p=0.95).kept(x.double(), x.double().logsumexp(0))
    assert abs(int(kept.count) - int(exact.count)) <= 2
    assert abs(float(kept.log_mass) - float(exact.log_mass)) < 2e-6
    assert float(exact.log_mass) == pytest.approx(math.log(0.95), abs=1e-5)


def test_many_small_shares_add_up_in_fp32_too():
    """A nucleus that ends in the tail of a vocabulary of two values: its share is a sum of 135,000 equal ones."""
    x = torch.zeros(150_000).index_fill_(0, torch.arange(135_000, 150_000), -1.0)
    total = x.double().logsumexp(0)
    kept = Rules(top_p=0.97).kept(x, total.float())
    p = (x.double() - total).exp()
    assert int(kept.count) == int((p.cumsum(0) - p < 0.97).sum()) == 138_541
    assert float(kept.log_mass) == pytest.approx(math.log(0.97), abs=1e-5)
