"""The k best entries slice by slice: the same as a stable sort of the whole row, however it is cut."""

import math

import pytest
import torch

import logitless as ll
from logitless.algebra.costs import waiting_entries
from logitless.vocab.backends.eager.topk import BLOCK, GROUP, TopK, keep_topk


@pytest.mark.parametrize("k", [1, 3, 16, 40])
@pytest.mark.parametrize("width", [1, 5, 16, 40])
def test_equal_entries_come_by_lowest_id(k, width):
    z = torch.randint(4, (9, 40)).double()  # ten of each
    z[0] = 1.0
    values, ids = torch.full((9, k), -math.inf, dtype=torch.float64), torch.full((9, k), -1)
    for start in range(0, 40, width):
        keep_topk(values, ids, z[:, start : start + width].clone(), start)
    expected = z.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :k])
    assert torch.equal(ids, expected.indices[:, :k])


@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("levels", [3, 1000, 10**9])
def test_wide_slices(k, levels):
    """Best entries from the best groups of neighbours, ties across groups and a ragged end included."""
    z = (torch.randint(levels, (7, 40 * GROUP * k + 37)) - levels // 2).double()
    z[0, :] = -math.inf
    z[0, [5, 4 * GROUP]] = 2.0
    values, ids = torch.full((7, k), -math.inf, dtype=torch.float64), torch.full((7, k), -1)
    keep_topk(values, ids, z, 0)
    expected = z.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :k])
    live = values > -math.inf
    assert torch.equal(ids[live], expected.indices[:, :k][live])
    assert all(len(set(row)) == k and min(row) >= 0 for row in ids.tolist())


def test_entries_without_probability_are_still_entries():
    bias = torch.full((50,), -math.inf)
    bias[[7, 30]] = 0.0
    head = ll.LMHead(torch.randn(50, 4), bias)
    stats = ll.token_stats(torch.randn(6, 4), head, want=("logsumexp",), top_k=5, memory_budget=400)
    assert (stats.top_k_ids[:, :2].sort(1).values == torch.tensor([7, 30])).all()
    assert all(len(set(row)) == 5 and min(row) >= 0 for row in stats.top_k_ids.tolist())


@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("width", [BLOCK - 1, BLOCK, 5 * BLOCK, 9 * BLOCK + 7])
@pytest.mark.parametrize("rows", ["random", "tied", "rising", "falling", "holes"])
def test_what_waits_is_sorted_in_time(k, width, rows):
    """Whatever the order in which a row's best entries come: few of them a slice, or more than there is room for."""
    n = 30 * BLOCK + 11
    z = torch.randn(6, n)
    z = {
        "random": z,
        "tied": (2 * z).round(),
        "rising": torch.linspace(0, 1, n) + 1e-3 * z,
        "falling": torch.linspace(1, 0, n) + 1e-3 * z,
        "holes": z.masked_fill(torch.rand(6, n) < 0.999, -math.inf),
    }[rows]
    best = TopK(z[:, 0], k)
    for start in range(0, n, width):
        best.add(z[:, start : start + width].clone(), start)
        assert best.count.max() <= waiting_entries(k)
    values, ids = best.flush()
    expected = z.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :k])
    live = values > -math.inf
    assert torch.equal(ids[live], expected.indices[:, :k][live])
    assert all(len(set(row)) == k and min(row) >= 0 for row in ids.tolist())
