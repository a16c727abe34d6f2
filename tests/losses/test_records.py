"""Divergences from a teacher's record against whole distributions in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from logitless import LMHead, losses, token_stats
from logitless.errors import OptionError, ShapeError
from tests.support.losses.comparing import N, V, assert_same, problem

K = 5


@pytest.fixture
def student_and_teacher():
    z, _ = problem()
    return z, 2 * torch.randn_like(z)


def kl(logp, logq):
    return F.kl_div(logq, logp, reduction="none", log_target=True).sum(-1)


def inside(ids):
    return torch.zeros(N, V, dtype=torch.bool).scatter(-1, ids, True)


def outcomes(logp, ids):
    """Log-probabilities of the K entries and of all others together."""
    tail = logp.masked_fill(inside(ids), -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(-1, ids), tail], -1)


def statistics(z, ids):
    left = z.log_softmax(-1).masked_fill(inside(ids), -torch.inf).logsumexp(-1)
    return z.gather(-1, ids), z.logsumexp(-1), left


def ours(loss, z, ids, log_weights, *more):
    logits, logsumexp, left = statistics(z, ids)
    return loss(logits, logsumexp, log_weights, left, *more)


def parts(z, logt, ids):
    """Of the divergence mass, head and tail, from renormalised distributions, and what the teacher gives to the two."""
    among, both = inside(ids), []
    for logp in (logt, z.log_softmax(-1)):
        mass = torch.stack([logp.masked_fill(~x, -torch.inf).logsumexp(-1) for x in (among, ~among)], -1)
        both.append((mass, logp - mass[:, :1], logp - mass[:, 1:]))
    (t_mass, t_head, t_tail), (s_mass, s_head, s_tail) = both
    head = torch.where(among, t_head.exp() * (t_head - s_head), 0.0).sum(-1)
    tail = torch.where(among, 0.0, t_tail.exp() * (t_tail - s_tail)).sum(-1)
    return kl(t_mass, s_mass), head, tail, t_mass.exp()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_k_entries_and_a_bucket(student_and_teacher, direction):
    z, teacher = student_and_teacher
    logt = teacher.log_softmax(-1)
    ids = logt.topk(K).indices

    def dense(z, logt):
        s, t = outcomes(z.log_softmax(-1), ids), outcomes(logt, ids)
        return kl(t, s) if direction == "forward" else kl(s, t)

    assert_same(lambda z, t: ours(losses.record_kl, z, ids, t.gather(-1, ids), direction), dense, z, logt)
    assert (
        dense(z, logt) <= (kl(logt, z.log_softmax(-1)) if direction == "forward" else kl(z.log_softmax(-1), logt))
    ).all()


def test_forward_has_the_gradient_of_soft_targets(student_and_teacher):
    z, teacher = student_and_teacher
    logt = teacher.log_softmax(-1)
    t, ids = logt.topk(K)
    grads = []
    for loss in (
        lambda z: ours(losses.record_kl, z, ids, t),
        lambda z: losses.soft_targets(*statistics(z, ids)[:2], t.exp(), tail_logprob=statistics(z, ids)[2]),
    ):
        leaf = z.detach().clone().requires_grad_()
        grads.append(torch.autograd.grad(loss(leaf).sum(), leaf)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("head_weight", "tail_weight"), [(1.0, 1.0), (0.3, 2.0)])
def test_the_parts_of_the_divergence(student_and_teacher, head_weight, tail_weight):
    z, teacher = student_and_teacher
    logt = teacher.log_softmax(-1)
    ids = logt.topk(K).indices
    mass, head, tail, shares = parts(z, logt, ids)
    torch.testing.assert_close(mass + shares[:, 0] * head + shares[:, 1] * tail, kl(logt, z.log_softmax(-1)))
    assert shares[:, 1].min() > 1e-3

    def dense(z, logt):
        mass, head, tail, _ = parts(z, logt, ids)
        return mass + head_weight * head + tail_weight * tail

    def full(z, logt, whole=True):
        more = kl(logt, z.log_softmax(-1)) if whole else None
        return ours(losses.decoupled_kl, z, ids, logt.gather(-1, ids), more, head_weight, tail_weight)

    assert_same(full, dense, z, logt)

    def without(z, logt):
        mass, head, _, _ = parts(z, logt, ids)
        return mass + head_weight * head

    assert_same(lambda z, logt: full(z, logt, whole=False), without, z, logt)


@pytest.mark.parametrize("weight", [2.0, 0.7])
def test_the_tail_of_a_sequence_counts_by_its_mean(student_and_teacher, weight):
    """Against the renormalised tails; the weight is divided by what the teacher gives to them in all tokens."""
    z, teacher = student_and_teacher
    logt = teacher.log_softmax(-1)
    ids = logt.topk(K).indices

    def dense(z, logt):
        mass, head, tail, shares = parts(z, logt, ids)
        in_head, in_tail = shares.unbind(-1)
        return mass + in_head * head + weight / in_tail.mean() * in_tail * tail

    def mine(z, logt):
        t = logt.gather(-1, ids)
        mean_tail = (1 - t.exp().sum(-1)).mean().expand(len(z))
        return ours(losses.tail_aware_kl, z, ids, t, kl(logt, z.log_softmax(-1)), mean_tail, weight)

    assert_same(mine, dense, z, logt)


def test_a_tail_that_counts_by_its_own_mass_is_the_plain_divergence(student_and_teacher):
    z, teacher = student_and_teacher
    logt = teacher.log_softmax(-1)
    t, ids = logt.topk(K)
    full, ones = kl(logt, z.log_softmax(-1)), torch.ones(len(z))
    torch.testing.assert_close(ours(losses.tail_aware_kl, z, ids, t, full, ones, 1.0), full)


def test_padding_is_no_outcome(student_and_teacher):
    z, teacher = student_and_teacher
    t, ids = teacher.log_softmax(-1).topk(K)
    longer = torch.cat([ids, ids[:, :1]], -1), torch.cat([t, torch.full_like(t[:, :1], -torch.inf)], -1)
    calls = [(losses.record_kl, "forward"), (losses.record_kl, "reverse"), (losses.decoupled_kl, z.logsumexp(-1))]
    for loss, more in calls:
        leaf = z.detach().clone().requires_grad_()
        found = ours(loss, leaf, *longer, more)
        torch.testing.assert_close(found, ours(loss, z, ids, t, more))
        assert torch.autograd.grad(found.sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize("loss", [losses.record_kl, losses.decoupled_kl])
def test_a_record_of_padding_alone_is_all_tail(student_and_teacher, loss):
    z, _ = student_and_teacher
    ids, nothing = torch.zeros(N, K, dtype=torch.int64), torch.full((N, K), -torch.inf, dtype=z.dtype)
    found, expected = ours(loss, z, ids, nothing), -outcomes(z.log_softmax(-1), ids)[:, -1]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), z)[0] for x in (found, expected)))


def test_a_record_of_the_whole_vocabulary():
    z = torch.randn(4, 6, requires_grad=True)
    t = torch.randn(4, 6).log_softmax(-1).bfloat16().float()  # what rounding leaves of 1 is no outcome
    none = torch.full((4,), -torch.inf)
    for direction in ("forward", "reverse"):
        loss = losses.record_kl(z, z.logsumexp(-1), t, none, direction)
        s = z.log_softmax(-1)
        torch.testing.assert_close(loss, kl(t, s) if direction == "forward" else kl(s, t), rtol=1e-4, atol=1e-5)
        assert torch.autograd.grad(loss.sum(), z, retain_graph=True)[0].isfinite().all()


def test_a_teachers_tail_too_small_for_digits_counts_as_its_least():
    """As documented: 1e-7 in the reverse direction, 1e-3 where the tail's inside is told from the whole."""
    z, full = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)
    ids, half = torch.tensor([[0, 1]]), torch.full((1,), 0.5, dtype=torch.float64).log()
    for tail, least in ((0.0, 1e-7), (5e-8, 1e-7), (2e-7, 2e-7)):
        t = torch.full((1, 2), (1 - tail) / 2, dtype=torch.float64).log()
        expected = 2 * 0.25 * (0.25 / t.exp()[0, 0]).log() + 0.5 * (0.5 / torch.tensor(least, dtype=t.dtype)).log()
        torch.testing.assert_close(losses.record_kl(z[:, :2], z.logsumexp(-1), t, half, "reverse")[0], expected)
    for tail, least in ((2e-4, 1e-3), (2e-3, 2e-3)):
        t = torch.full((1, 2), (1 - tail) / 2, dtype=torch.float64).log()
        bucket = losses.record_kl(z[:, :2], z.logsumexp(-1), t, half)
        inside = (full - bucket) / least
        given = (z.gather(-1, ids), z.logsumexp(-1), t, half, full)
        torch.testing.assert_close(losses.decoupled_kl(*given), bucket + inside)
        mean = torch.full_like(full, tail)
        torch.testing.assert_close(losses.tail_aware_kl(*given, mean), bucket + 2 * inside)


def test_weights_that_round_above_1_leave_nothing_to_the_tail():
    z, t = torch.zeros(1, 4, dtype=torch.float64), torch.full((1, 2), 0.504, dtype=torch.float64).log()
    found = losses.record_kl(z[:, :2], z.logsumexp(-1), t, torch.full((1,), 0.5, dtype=torch.float64).log())
    torch.testing.assert_close(found, (t.exp() * (t - math.log(0.25))).sum(-1))


def test_a_tail_of_one_in_a_million_keeps_its_digits():
    t, s, found = torch.tensor([[-1e-6]]), torch.tensor([-2e-6]), []
    for kind in (torch.float32, torch.float64):
        tail = (-torch.expm1(s.double())).log().to(kind)
        found.append(losses.record_kl(torch.zeros(1, 1, dtype=kind), -s.to(kind), t.to(kind), tail).double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)


@pytest.mark.parametrize("ahead", [8.0, 15.0, 25.0])
def test_a_record_of_little_of_the_student_keeps_its_digits(ahead):
    """What its ids leave of 1 rounds to 1 in fp32: their log-probs are told from the log-sum-exp then."""
    z = torch.randn(1, 9)
    z[0, 0] = ahead
    ids, t, found = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.4]]).log(), []
    for dtype in (torch.float32, torch.float64):
        head, want = LMHead(torch.eye(9, dtype=dtype)), ("logsumexp", "tail_logprob")
        s = token_stats(z.to(dtype), head, want=want, candidates=ids)
        found.append(losses.record_kl(s.candidate_logits, s.logsumexp, t.to(dtype), s.tail_logprob).double())
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shift", [0.0, -40.0])
def test_a_sure_student_keeps_its_digits_however_low_all_logits_are(shift):
    """Beside a slot of padding; in fp32 the difference to a log-sum-exp of -26 has no digit of 8e-6."""
    z = (512 * torch.randn(1, 9)).round() / 512
    z[0, 0] = 14.0
    head, want, ids = LMHead(torch.eye(9)), ("logsumexp", "tail_logprob"), torch.tensor([[0, 0]])
    s = token_stats(z + shift, head, want=want, candidates=ids)
    found = losses.record_kl(s.candidate_logits, s.logsumexp, torch.tensor([[0.0, -torch.inf]]), s.tail_logprob)
    torch.testing.assert_close(found.double(), -z.double().log_softmax(-1)[:, 0], rtol=2e-6, atol=0)


def test_no_tokens_have_no_divergence(student_and_teacher):
    z, teacher = student_and_teacher
    t, ids = teacher.log_softmax(-1)[:0].topk(K)
    assert losses.record_kl(z[:0].gather(-1, ids), z[:0, 0], t, z[:0, 0]).shape == (0,)


def test_a_sure_teacher_and_student_stay_finite():
    """A tail below what fp32 weights can say: no infinity in either direction, and no gradient that is none."""
    z = torch.zeros(1, 9)
    z[0, 0] = 60.0
    z.requires_grad_()
    ids, t = torch.tensor([[0, 1]]), torch.tensor([[0.0, -60.0]])
    left = z.log_softmax(-1)[:, 2:].logsumexp(-1)
    for loss, more in ((losses.record_kl, "forward"), (losses.record_kl, "reverse"), (losses.decoupled_kl, left)):
        found = loss(z.gather(-1, ids), z.logsumexp(-1), t, left, more)
        assert found.isfinite().all()
        assert torch.autograd.grad(found.sum(), z, retain_graph=True)[0].isfinite().all()


def test_what_has_no_meaning():
    z, one = torch.randn(3, 2), torch.randn(3)
    with pytest.raises(OptionError, match="direction must be 'forward' or 'reverse', got 'both'"):
        losses.record_kl(z, one, z, one, "both")
    with pytest.raises(ShapeError, match=r"log_weights must have candidate_logits' shape .* here \(3, 2\), got \(3,\)"):
        losses.record_kl(z, one, one, one)
    with pytest.raises(ShapeError, match=r"log_weights must have candidate_logits' shape .* here \(\), got \(\)"):
        losses.record_kl(one[0], one[0], one[0], one[0])
    with pytest.raises(ShapeError, match=r"candidate_logits must have K of 1 or more ids per token, got \(3, 0\)"):
        losses.record_kl(z[:, :0], one, z[:, :0], one)
