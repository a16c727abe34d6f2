"""A piece that losses share, at the edges that the losses' own tests are too coarse for."""

import torch

from logitless.losses._numbers import log1mexp


def test_log1mexp_keeps_its_digits_at_both_ends():
    x = -torch.logspace(-30, 1.9, 400)
    exact = x.double()
    expected = torch.where(exact > -1e-3, (-torch.expm1(exact)).log(), torch.log1p(-exact.exp()))
    torch.testing.assert_close(log1mexp(x).double(), expected, rtol=3e-7, atol=0)
    assert log1mexp(torch.tensor([0.0, -torch.inf])).tolist() == [torch.tensor(torch.finfo().tiny).log(), 0.0]
