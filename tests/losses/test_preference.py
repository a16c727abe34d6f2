"""Preference losses against their formulas written with plain sigmoids and odds."""

import math

import pytest
import torch

from logitless import losses
from logitless.errors import OptionError, ShapeError
from tests.support.losses.comparing import assert_same

B = 16


@pytest.fixture
def pairs():
    """Sequence log-probs of chosen, rejected, and both under the reference: all need a gradient."""
    return [(-3 * torch.rand(B, dtype=torch.float64) - 0.05).requires_grad_() for _ in range(4)]


def test_sequence_logprob():
    logprob = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    rows = [logprob[0, :2], logprob[1], logprob[2, :0]]
    assert_same(lambda x: losses.sequence_logprob(x, mask), lambda x: (x * mask).sum(-1), logprob)
    averages = losses.sequence_logprob(logprob, mask, average=True)
    torch.testing.assert_close(averages, torch.stack([rows[0].mean(), rows[1].mean(), rows[2].sum()]))
    torch.testing.assert_close(losses.sequence_logprob(logprob), logprob.sum(-1))
    torch.testing.assert_close(losses.sequence_logprob(logprob, average=True), logprob.mean(-1))


def test_what_lies_under_the_mask_does_not_matter():
    logprob = torch.tensor([[-1.0, -torch.inf], [-2.0, torch.nan]], requires_grad=True)
    total = losses.sequence_logprob(logprob, torch.tensor([[True, False]]).expand(2, 2))
    assert total.tolist() == [-1.0, -2.0]
    total.sum().backward()
    assert logprob.grad.tolist() == [[1.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(pairs, smoothing):
    def dense(c, r, rc, rr):
        # The chosen response's share under the implied rewards.
        win, lose = (c - rc) * 0.7, (r - rr) * 0.7
        share = win.exp() / (win.exp() + lose.exp())
        return -(1 - smoothing) * share.log() - smoothing * (1 - share).log()

    assert_same(lambda *x: losses.dpo(*x, beta=0.7, label_smoothing=smoothing), dense, *pairs)


def test_ipo(pairs):
    assert_same(lambda *x: losses.ipo(*x, tau=0.4), lambda c, r, rc, rr: ((c - rc) - (r - rr) - 1 / 0.8) ** 2, *pairs)


def test_kto(pairs):
    logprob, ref, mismatched, ref_mismatched = pairs
    desirable = torch.arange(B) % 3 == 0
    baseline = losses.kto_baseline(mismatched, ref_mismatched)
    torch.testing.assert_close(baseline, (mismatched - ref_mismatched).mean().clamp(min=0))
    assert not baseline.requires_grad

    def dense(logprob, ref):
        gain = 0.3 * (logprob - ref - baseline.item())
        good, bad = 1 / (1 + (-gain).exp()), 1 / (1 + gain.exp())
        return torch.where(desirable, 1.5 * (1 - good), 0.5 * (1 - bad))

    def ours(logprob, ref):
        return losses.kto(logprob, ref, desirable, baseline.to(logprob.dtype), 0.3, 1.5, 0.5)

    assert_same(ours, dense, logprob, ref)


def test_kto_baseline_is_never_negative():
    assert losses.kto_baseline(torch.tensor([-2.0]), torch.tensor([-1.0])).item() == 0.0


def test_orpo(pairs):
    def dense(c, r):
        odds = (c.exp() / (1 - c.exp())) / (r.exp() / (1 - r.exp()))
        return -c + 0.25 * (1 + 1 / odds).log()

    assert_same(lambda c, r: losses.orpo(c, r, beta=0.25), dense, *pairs[:2])


@pytest.mark.parametrize("chosen", [-1e-9, -1e-4, -0.69, -0.7, -80.0, 0.0])
def test_orpo_at_both_ends(chosen):
    logp = torch.tensor([chosen], requires_grad=True)
    loss = losses.orpo(logp, torch.tensor([-2.0]), beta=0.5)
    x = torch.tensor([min(chosen, -1e-37)], dtype=torch.float64, requires_grad=True)
    odds = x - torch.log(-torch.expm1(x)) - (-2.0 - math.log(1 - math.exp(-2.0)))
    dense = -x + 0.5 * torch.nn.functional.softplus(-odds)
    torch.testing.assert_close(loss.double(), dense, rtol=1e-5, atol=1e-7)
    slope, expected = torch.autograd.grad(loss, logp)[0], torch.autograd.grad(dense, x)[0]
    assert slope.isfinite().all()
    if chosen < 0:
        torch.testing.assert_close(slope.double(), expected, rtol=1e-4, atol=1e-6)


def share(margin):
    """The chosen response's share under a margin of implied rewards."""
    return 1 / (1 + (-margin).exp())


# Each pair loss at beta = 0.7 from log-ratios of the chosen and the rejected response.
PAIRS = {
    "robust_dpo": ({"label_smoothing": 0.2}, lambda w, r: (0.2 * share(r - w).log() - 0.8 * share(w - r).log()) / 0.6),
    "hinge": ({}, lambda w, r: torch.where(w - r < 1, 1 - w + r, 0.0)),
    "exo_pair": (
        {"label_smoothing": 0.1},
        lambda w, r: share(w - r) * (share(w - r) / 0.9).log() + share(r - w) * (share(r - w) / 0.1).log(),
    ),
    "discopop": (
        {"tau": 0.3},
        lambda w, r: share((r - w) / 0.3) * (1 + (r - w).exp()).log() + share((w - r) / 0.3) * (r - w).exp(),
    ),
    "nca_pair": ({}, lambda w, r: -share(w).log() - 0.5 * (1 - share(w)).log() - 0.5 * (1 - share(r)).log()),
    "bco_pair": ({"baseline": 0.3}, lambda w, r: (1 + (0.3 - w).exp()).log() + (1 + (r - 0.3).exp()).log()),
    "sppo_hard": ({}, lambda w, r: (w / 0.7 - 1 / 1.4) ** 2 + (r / 0.7 + 1 / 1.4) ** 2),
    "apo_zero": ({}, lambda w, r: 1 - share(w) + share(r)),
    "apo_down": ({}, lambda w, r: share(w) + 1 - share(w - r)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pair_losses(pairs, name):
    options, dense = PAIRS[name]
    loss = getattr(losses, name)
    assert_same(
        lambda *x: loss(*x, beta=0.7, **options),
        lambda c, r, rc, rr: dense(0.7 * (c - rc), 0.7 * (r - rr)),
        *pairs,
    )


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("far", [-4000.0, 4000.0])
def test_pair_losses_stay_finite_at_wide_margins(name, far):
    chosen, zero = torch.tensor([far], requires_grad=True), torch.zeros(1)
    loss = getattr(losses, name)(chosen, zero, zero, zero)
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss, chosen)[0].isfinite().all()


def test_a_robust_loss_averages_to_the_clean_one(pairs):
    c, r, rc, rr = pairs
    mixed = 0.7 * losses.robust_dpo(c, r, rc, rr, 0.1, 0.3) + 0.3 * losses.robust_dpo(r, c, rr, rc, 0.1, 0.3)
    torch.testing.assert_close(mixed, losses.dpo(c, r, rc, rr, 0.1))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo(pairs, smoothing):
    def dense(c, r):
        x = 1.5 * (c - r) - 0.4
        return -(1 - smoothing) * share(x).log() - smoothing * (1 - share(x)).log()

    assert_same(lambda c, r: losses.simpo(c, r, 1.5, 0.4, label_smoothing=smoothing), dense, *pairs[:2])


def test_wide_margins_stay_finite():
    far = torch.tensor([-4000.0], requires_grad=True)
    near, zero = torch.tensor([-1.0]), torch.zeros(1)
    for loss in (losses.dpo(far, near, zero, zero), losses.simpo(far, near), losses.orpo(far, near)):
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss, far)[0].isfinite().all()


def test_bad_input_is_named():
    x = torch.zeros(3)
    with pytest.raises(ShapeError, match="rejected"):
        losses.dpo(x, torch.zeros(3, 1), x, x)
    with pytest.raises(ShapeError, match="mask"):
        losses.sequence_logprob(torch.zeros(3, 3), x)
    with pytest.raises(OptionError, match="label_smoothing"):
        losses.dpo(x, x, x, x, label_smoothing=0.5)
    for loss in (losses.robust_dpo, losses.exo_pair):
        with pytest.raises(OptionError, match="label_smoothing"):
            loss(x, x, x, x, label_smoothing=0.5)
    with pytest.raises(OptionError, match="label_smoothing must be above 0"):
        losses.exo_pair(x, x, x, x, label_smoothing=0.0)
    with pytest.raises(OptionError, match="label_smoothing"):
        losses.simpo(x, x, label_smoothing=-0.1)
    with pytest.raises(OptionError, match="tau"):
        losses.discopop(x, x, x, x, tau=0.0)
    with pytest.raises(OptionError, match="beta"):
        losses.sppo_hard(x, x, x, x, beta=0.0)
    for tau in (0.0, math.nan):
        with pytest.raises(OptionError, match=f"tau must be positive, got {tau}"):
            losses.ipo(x, x, x, x, tau=tau)
