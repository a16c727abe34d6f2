"""The formulas behind the rows of the table of statistics, and who else lists the rows."""

import math

import pytest
import torch

from logitless.algebra.stats import STATISTICS, from_uniform, mixture_logs
from logitless.vocab.stats import TokenStats


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_mixture_logs(beta):
    d = torch.tensor([0.0, 1e-9, -1e-9, 0.3, -0.3, 20.0, -20.0, 800.0, -800.0], dtype=torch.float64)
    log_p, log_q = mixture_logs(d, beta, torch)
    near = d.abs() < 700
    p_over_m = 1 / ((1 - beta) + beta * torch.exp(-d[near]))
    torch.testing.assert_close(log_p[near], p_over_m.log(), rtol=1e-7, atol=1e-16)
    torch.testing.assert_close(log_p - log_q, d)
    assert log_p.isfinite().all()
    small = torch.tensor([1e-9], dtype=torch.float64)
    torch.testing.assert_close(mixture_logs(small, beta, torch)[0], beta * small, rtol=1e-6, atol=0)


def test_a_kl_is_not_negative_and_says_where_no_entry_is_possible():
    kl = torch.tensor([-1e-7, 0.5, math.inf, math.nan, -math.inf, math.nan])
    lse = torch.tensor([1.0, 1.0, 1.0, math.nan, -math.inf, -math.inf])
    expected = torch.tensor([0.0, 0.5, math.inf, math.nan, math.nan, math.nan])
    torch.testing.assert_close(from_uniform(kl, lse), expected, rtol=0, atol=0, equal_nan=True)


def test_every_statistic_is_annotated_where_it_is_read():
    assert set(TokenStats.__annotations__) == {*STATISTICS, "top_k_ids", "top_k_logits", "candidate_logits"}
