"""ArcFace and CosFace against dense float64, alone and through the pass over normalised rows."""

import math

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless import losses
from logitless.errors import OptionError, ShapeError
from tests.support.losses.comparing import assert_same
from tests.support.vocab.comparing import assert_near_in_norm
from tests.support.vocab.measuring import measure

SCALE = 16.0
KINDS = ("arcface", "cosface")


def cosines(hidden, weight):
    return F.normalize(hidden, dim=-1) @ F.normalize(weight, dim=-1).T


def dense(kind, hidden, weight, labels, margin, scale=SCALE):
    """As the papers have it: the cosine at the label replaced in whole logits."""
    cosine = cosines(hidden, weight)
    edited = (cosine.acos() + margin).cos() if kind == "arcface" else cosine - margin
    z = scale * torch.where(F.one_hot(labels, len(weight)).bool(), edited, cosine)
    return F.cross_entropy(z, labels, reduction="none")


def of_stats(kind, stats, margin, scale=SCALE):
    if kind == "arcface":
        return losses.arcface(stats.logprob, stats.label_logit, scale, margin)
    return losses.cosface(stats.logprob, scale, margin)


def streamed(kind, hidden, weight, labels, margin, reduction="none", **options):
    head = ll.LMHead(F.normalize(weight, dim=-1), scale=SCALE)
    return ll.token_loss(
        lambda stats: of_stats(kind, stats, margin),
        F.normalize(hidden, dim=-1),
        head,
        labels,
        want=("logprob", "label_logit"),
        reduction=reduction,
        **options,
    )


def operands(n=12, h=7, v=23):
    hidden, weight = (torch.randn(m, h, dtype=torch.float64, requires_grad=True) for m in (n, v))
    return hidden, weight, torch.randint(v, (n,))


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.5, 1.5])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_dense_in_value_and_gradient(kind, margin):
    hidden, weight, labels = operands()
    assert_same(
        lambda h, w: streamed(kind, h, w, labels, margin),
        lambda h, w: dense(kind, h, w, labels, margin),
        hidden,
        weight,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_over_tokens_that_count(kind, backend):
    hidden, weight, labels = operands()
    labels[3] = -100
    keep = labels >= 0
    expected = dense(kind, hidden[keep], weight, labels[keep], 0.4).mean()
    wanted = torch.autograd.grad(expected, (hidden, weight))
    got = streamed(kind, hidden, weight, labels, 0.4, "mean", backend=backend)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)
    for a, b in zip(torch.autograd.grad(got, (hidden, weight)), wanted, strict=True):
        assert_near_in_norm(a, b, 1e-10)


@pytest.mark.parametrize("cosine", [0.5, 1 - 2.0**-13])  # whose square rounds in fp32
@pytest.mark.parametrize("lead", [-100.0, 2.0, 12.0, 30.0, 60.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sure_token_and_one_of_no_chance_keep_their_digits(kind, lead, cosine):
    # all others, 49, have one cosine: 1 - p has no digits in fp32 from a lead of 17 on
    scale, margin, others, angle = 64.0, 0.25, 49, math.acos(cosine)
    logit = torch.tensor(scale * cosine, dtype=torch.float64, requires_grad=True)
    rest = logit.detach() - lead + math.log(others)  # their log-sum-exp
    by = scale * ((math.cos(angle + margin) - cosine) if kind == "arcface" else -margin)
    steep = math.sin(angle + margin) / math.sin(angle) if kind == "arcface" else 1.0
    expected = F.softplus(rest - logit - by).detach()
    slope = -steep * torch.sigmoid(rest - logit - by).detach()

    def ours(z):
        z = z.float()
        logprob = -torch.logaddexp(rest.float() - z, torch.zeros_like(z))
        if kind == "arcface":
            return losses.arcface(logprob, z, scale, margin)
        return losses.cosface(logprob, scale, margin)

    got = ours(logit)
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=0)
    torch.testing.assert_close(torch.autograd.grad(got, logit)[0], slope, rtol=2e-5, atol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_angle_of_nothing_has_finite_gradients(sign):
    logprob = torch.tensor([-1.0, 0.0], requires_grad=True)
    logit = torch.tensor([sign * 64.0001, sign * 64.0], requires_grad=True)  # rounding passes 1
    loss = losses.arcface(logprob, logit)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprob.grad.isfinite().all()
    assert logit.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_as_large_as_the_logits(kind):
    n, h, v = 512, 16, 4096
    hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
    labels = torch.randint(v, (n,))

    def step():
        streamed(kind, hidden, weight, labels, 0.3, "mean", memory_budget=1 << 18).backward()

    assert measure(step, memory=True).peak < n * v  # a quarter of the logits' bytes


@pytest.mark.parametrize(("kind", "margin"), [("arcface", 1.0), ("cosface", 0.9)])
def test_an_edit_that_logprob_cannot_tell_the_others_of_is_refused(kind, margin):
    """As far as it is taken, a label ahead by any lead has the right loss, where its log-prob is 0 in fp32, too."""
    cosine = torch.tensor(math.cos(1.0), dtype=torch.float64)
    most = 2 * math.sin(margin / 2) if kind == "arcface" else margin
    scale = 71.0 / most
    by = -scale * ((cosine - math.cos(1.0 + margin)) if kind == "arcface" else margin)
    lead = torch.tensor([60.0, 80.0, 100.0, 120.0], dtype=torch.float64)
    numbers = {"logprob": -F.softplus(-lead).float(), "label_logit": (scale * cosine).float().expand(4)}
    got = of_stats(kind, ll.TokenStats(numbers), margin, scale)
    torch.testing.assert_close(got.double(), F.softplus(-lead - by), rtol=1e-4, atol=2e-7)
    with pytest.raises(OptionError, match=r"label's logit at most 71\.39 lower, in torch\.float32, got scale"):
        of_stats(kind, ll.TokenStats(numbers), margin, scale * 1.01)


def test_bad_options_are_named():
    x = torch.zeros(3)
    for scale in (0.0, math.inf, 10**400, torch.tensor(64.0), torch.full((3,), 64.0)):
        with pytest.raises(OptionError, match="scale must be a positive number"):
            losses.cosface(x, scale=scale)
    for margin in (-0.1, math.inf, 10**400, torch.tensor(0.3)):
        with pytest.raises(OptionError, match="margin must be a number of at least 0"):
            losses.cosface(x, margin=margin)
    with pytest.raises(OptionError, match="angle"):
        losses.arcface(x, x, margin=4.0)
    with pytest.raises(ShapeError, match="label_logit"):
        losses.arcface(x, torch.zeros(3, 3))
