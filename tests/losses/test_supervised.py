"""Supervised losses against their dense formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

from logitless import losses
from logitless.errors import OptionError
from tests.support.losses.comparing import assert_same, problem, stats_of


def test_nll():
    z, labels = problem()
    assert_same(
        lambda z: losses.nll(stats_of(z, labels).logprob),
        lambda z: F.cross_entropy(z, labels, reduction="none"),
        z,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_label_smoothing(smoothing):
    z, labels = problem()

    def ours(z):
        s = stats_of(z, labels)
        return losses.label_smoothing(s.logprob, s.logsumexp, s.mean_logit, smoothing)

    assert_same(ours, lambda z: F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing), z)


def test_z_loss():
    z, labels = problem()
    assert_same(
        lambda z: losses.z_loss(stats_of(z, labels).logsumexp, 0.3),
        lambda z: 0.3 * z.exp().sum(-1).log() ** 2,
        z,
    )


def test_no_label_smoothing_beside_an_impossible_entry():
    logits = torch.tensor([[0.5, -torch.inf, 1.0]])
    logprob, mean = logits.log_softmax(-1)[:, 2], logits.mean(-1)
    ours = losses.label_smoothing(logprob, logits.logsumexp(-1), mean, 0.0)
    torch.testing.assert_close(ours, F.cross_entropy(logits, torch.tensor([2]), reduction="none", label_smoothing=0.0))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal(gamma):
    z, labels = problem()

    def dense(z):
        p = z.softmax(-1)[torch.arange(len(labels)), labels]
        return -((1 - p) ** gamma) * p.log()

    assert_same(lambda z: losses.focal(stats_of(z, labels).logprob, gamma), dense, z)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("miss", [0.0, 1e-12, 1e-6])
def test_focal_of_a_certain_token(gamma, miss):
    # (1 - p) computed from p would be 0 or one rounding step here.
    logprob = torch.tensor([math.log1p(-miss)], dtype=torch.float32, requires_grad=True)
    loss = losses.focal(logprob, gamma)
    torch.testing.assert_close(loss.item(), miss**gamma * -math.log1p(-miss), rtol=1e-5, atol=1e-40)
    (slope,) = torch.autograd.grad(loss, logprob)
    p = 1.0 - miss
    expected = gamma * miss ** (gamma - 1) * p * math.log1p(-miss) - miss**gamma if miss else 0.0
    torch.testing.assert_close(slope.item(), expected, rtol=1e-5, atol=1e-18)


def test_dft_treats_its_weight_as_a_constant():
    z, labels = problem()

    def dense(z):
        p = z.softmax(-1)[torch.arange(len(labels)), labels]
        return -p.detach() * p.log()

    assert_same(lambda z: losses.dft(stats_of(z, labels).logprob), dense, z)
    impossible = torch.tensor([-math.inf, -1.0], requires_grad=True)
    loss = losses.dft(impossible)
    assert loss.tolist() == pytest.approx([0.0, math.exp(-1)])
    assert torch.autograd.grad(loss.sum(), impossible)[0].tolist() == pytest.approx([0.0, -math.exp(-1)])
    unknown = torch.tensor(math.nan, requires_grad=True)
    losses.dft(unknown).backward()
    assert losses.dft(unknown).isnan()
    assert unknown.grad.isnan()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_has_the_slope_of_nll_at_an_impossible_label(gamma):
    impossible = torch.tensor([-math.inf, -1e38, -1e4], requires_grad=True)
    loss = losses.focal(impossible, gamma)
    assert torch.equal(loss, -impossible)
    assert torch.autograd.grad(loss.sum(), impossible)[0].tolist() == [-1.0, -1.0, -1.0]


def test_bad_options_are_named():
    x = torch.zeros(3)
    for smoothing in (1.5, -0.5, math.nan):
        with pytest.raises(OptionError, match=rf"smoothing must be in \[0, 1\], got {smoothing}"):
            losses.label_smoothing(x, x, x, smoothing)
    for gamma in (-1.0, math.nan):
        with pytest.raises(OptionError, match=f"gamma must be at least 0, got {gamma}"):
            losses.focal(x, gamma)
