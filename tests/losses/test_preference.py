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


def test_simpo(pairs):
    assert_same(
        lambda c, r: losses.simpo(c, r, beta=1.5, margin=0.4),
        lambda c, r: (1 + (-(1.5 * (c - r) - 0.4)).exp()).log(),
        *pairs[:2],
    )


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
    with pytest.raises(OptionError, match="tau"):
        losses.ipo(x, x, x, x, tau=0.0)
