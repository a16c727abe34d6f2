"""Distillation losses against whole distributions."""

import pytest
import torch
import torch.nn.functional as F

from logitless import LMHead, losses, token_loss, token_stats
from logitless.errors import OptionError, ShapeError
from tests.support.losses.comparing import N, V, assert_same, problem, stats_of

K = 5


@pytest.fixture
def student_and_teacher():
    z, labels = problem()
    return z, labels, 2 * torch.randn_like(z)


def kl(logp, logq):
    return F.kl_div(logq, logp, reduction="none", log_target=True).sum(-1)


def test_forward_and_reverse_kl(student_and_teacher):
    z, labels, teacher = student_and_teacher
    for ours, dense in (
        (lambda s: losses.forward_kl(s.reverse_kl, 3.0), lambda s, t: 9 * kl(t, s)),
        (lambda s: losses.reverse_kl(s.kl, 3.0), lambda s, t: 9 * kl(s, t)),
    ):
        assert_same(
            lambda z, t, ours=ours: ours(stats_of(z / 3, labels, t / 3)),
            lambda z, t, dense=dense: dense((z / 3).log_softmax(-1), (t / 3).log_softmax(-1)),
            *(z, teacher),
        )


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_jsd(student_and_teacher, beta):
    z, labels, teacher = student_and_teacher

    def dense(z, t):
        p, q = z.softmax(-1), t.softmax(-1)
        m = (1 - beta) * p + beta * q
        return 9 * ((1 - beta) * kl(p.log(), m.log()) + beta * kl(q.log(), m.log()))

    assert_same(lambda z, t: losses.jsd(stats_of(z, labels, t, beta).jsd, 3.0), dense, z, teacher)


@pytest.mark.parametrize("skew", [0.1, 0.4])
def test_skewed_kl_both_ways(skew):
    """By the pass, whose `jsd_beta` is what each says: KL(t, a·t + (1-a)·s) and KL(s, (1-a)·t + a·s)."""
    hidden, weight = torch.randn(N, 8).double().requires_grad_(), torch.randn(V, 8).double().requires_grad_()
    reference = torch.randn(N, 5).double(), LMHead(torch.randn(V, 5).double())
    s, t = (hidden @ weight.T / 3).softmax(-1), (reference[0] @ reference[1].weight.T / 3).softmax(-1)
    for ours, statistic, beta, p, m in (
        (losses.skewed_kl, "reverse_kl_mixture", skew, t, skew * t + (1 - skew) * s),
        (losses.skewed_reverse_kl, "kl_mixture", 1 - skew, s, (1 - skew) * t + skew * s),
    ):
        loss = token_loss(
            lambda x, ours=ours, statistic=statistic: ours(getattr(x, statistic), 3.0),
            *(hidden, LMHead(weight)),
            want=(statistic,),
            reference=reference,
            jsd_beta=beta,
            temperature=3.0,
        )
        dense = 9 * kl(p.log(), m.log()).mean()
        torch.testing.assert_close(loss, dense)
        found, wanted = (torch.autograd.grad(x, [hidden, weight], retain_graph=True) for x in (loss, dense))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def overlap(s, t):
    return torch.minimum(s.softmax(-1), t.softmax(-1)).sum(-1)


def test_losses_of_the_acceptance_rate(student_and_teacher):
    z, labels, teacher = student_and_teacher

    def hybrid(z, t):
        accepted = overlap(z, t)
        weight = torch.exp(-2.0 * accepted.detach())
        return weight * kl(t.log_softmax(-1), z.log_softmax(-1)) + (1 - weight) * (1 - accepted)

    for ours, dense in (
        (lambda s: losses.total_variation(s.total_variation), lambda z, t: 1 - overlap(z, t)),
        (lambda s: losses.negative_log_acceptance(s.acceptance), lambda z, t: -overlap(z, t).log()),
        (lambda s: losses.negative_log_acceptance(s.acceptance, 0.2), lambda z, t: -overlap(z, t).clamp_min(0.2).log()),
        (lambda s: losses.lk_hybrid(s.reverse_kl, s.total_variation, eta=2.0), hybrid),
    ):
        assert_same(lambda z, t, ours=ours: ours(stats_of(z, labels, t)), dense, z, teacher)


def test_a_draft_that_is_never_accepted_has_a_finite_loss():
    loss = losses.negative_log_acceptance(torch.tensor([0.0, 1.0]))
    assert 80 < loss[0] < 100
    assert loss[1] == 0


def test_lk_hybrid_is_forward_kl_far_from_the_teacher_and_total_variation_next_to_it():
    kl, far, near = torch.tensor(3.0), torch.tensor(1.0), torch.tensor(0.0)
    assert losses.lk_hybrid(kl, far) == kl
    assert losses.lk_hybrid(kl, near, eta=50.0) < 1e-20


def test_a_draft_trained_for_acceptance_is_accepted_more():
    """A draft of rank 2 cannot be its target: what its loss asks for is what it gets better at."""
    torch.manual_seed(0)
    target_hidden, target = torch.randn(64, 16), LMHead(torch.randn(40, 16))
    inputs, weight = torch.randn(64, 2), 0.1 * torch.randn(40, 2)
    wanted = {
        "forward_kl": (("reverse_kl",), lambda s: losses.forward_kl(s.reverse_kl)),
        "nla": (("acceptance",), lambda s: losses.negative_log_acceptance(s.acceptance)),
        "lk_hybrid": (("reverse_kl", "total_variation"), lambda s: losses.lk_hybrid(s.reverse_kl, s.total_variation)),
    }
    accepted = {}
    for name, (want, loss_fn) in wanted.items():
        x, w = inputs.clone().requires_grad_(), weight.clone().requires_grad_()
        adam, reference = torch.optim.Adam([x, w], 0.05), (target_hidden, target)
        for _ in range(150):
            adam.zero_grad()
            token_loss(loss_fn, x, LMHead(w), want=want, reference=reference).backward()
            adam.step()
        with torch.no_grad():
            accepted[name] = overlap(x @ w.T, target_hidden @ target.weight.T).mean().item()
    assert accepted["nla"] > accepted["forward_kl"] + 0.01, accepted
    assert accepted["lk_hybrid"] > accepted["forward_kl"] + 0.01, accepted


def record(teacher, mass_left=True):
    """The teacher's K best ids and their probabilities; scaled to sum to one when nothing is to be left."""
    weights, ids = teacher.softmax(-1).topk(K)
    return ids, weights if mass_left else weights / weights.sum(-1, keepdim=True)


def sparse(z, ids, weights, tail):
    inside = torch.zeros_like(z, dtype=torch.bool).scatter(-1, ids, True)
    left = z.log_softmax(-1).masked_fill(inside, -torch.inf).logsumexp(-1)
    return losses.soft_targets(z.gather(-1, ids), z.logsumexp(-1), weights, tail, tail_logprob=left)


def test_soft_targets_compare_the_tail_as_one_outcome(student_and_teacher):
    z, _, teacher = student_and_teacher
    ids, weights = record(teacher)

    def dense(z, w):
        p = z.softmax(-1)
        inside = torch.zeros(N, V, dtype=torch.bool).scatter(-1, ids, True)
        tail = torch.where(inside, 0.0, p).sum(-1)
        return -(w * p.gather(-1, ids).log()).sum(-1) - (1 - w.sum(-1)) * tail.log()

    assert_same(lambda z, w: sparse(z, ids, w, "bucket"), dense, z, weights)


@pytest.mark.parametrize("tail", ["bucket", "renormalise", "ignore"])
def test_a_complete_record_is_plain_cross_entropy(student_and_teacher, tail):
    z, _, teacher = student_and_teacher
    ids, weights = record(teacher, mass_left=False)

    def dense(z, w):
        whole = torch.zeros(N, V, dtype=z.dtype).scatter(-1, ids, w)
        return F.cross_entropy(z, whole, reduction="none")

    assert_same(lambda z, w: sparse(z, ids, w, tail), dense, z, weights)


def test_renormalise_and_ignore(student_and_teacher):
    z, _, teacher = student_and_teacher
    ids, weights = record(teacher)
    logp = z.log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(sparse(z, ids, weights, "ignore"), -(weights * logp).sum(-1))
    scaled = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(sparse(z, ids, weights, "renormalise"), -(scaled * logp).sum(-1))


@pytest.mark.parametrize("tail", ["renormalise", "ignore"])
def test_a_dropped_tail_need_not_be_known(student_and_teacher, tail):
    z, _, teacher = student_and_teacher
    ids, weights = record(teacher)
    weights[0] = 0.0  # a token without a record: padding alone
    assert_same(
        lambda z, w: losses.soft_targets(z.gather(-1, ids), z.logsumexp(-1), w, tail),
        lambda z, w: sparse(z, ids, w, tail),
        *(z, weights),
    )
    assert sparse(z, ids, weights, tail)[0] == 0


def test_weights_that_round_above_1_leave_nothing_to_the_tail(student_and_teacher):
    z, _, teacher = student_and_teacher
    ids, weights = record(teacher, mass_left=False)
    torch.testing.assert_close(sparse(z, ids, 1.01 * weights, "bucket"), 1.01 * sparse(z, ids, weights, "ignore"))


def test_only_the_bucket_is_least_at_the_teacher(student_and_teacher):
    _, _, teacher = student_and_teacher
    ids, weights = record(teacher)
    slope = {}
    for tail in ("bucket", "renormalise", "ignore"):
        z = teacher.clone().requires_grad_()
        slope[tail] = torch.autograd.grad(sparse(z, ids, weights, tail).sum(), z)[0].abs().max().item()
    assert slope["bucket"] < 1e-12
    assert slope["renormalise"] > 1e-2
    assert slope["ignore"] > 1e-2


def test_slots_of_weight_zero_are_padding(student_and_teacher):
    z, _, teacher = student_and_teacher
    ids, weights = record(teacher)
    for tail in ("bucket", "renormalise", "ignore"):  # a repeat; any id where the tail is not compared
        other = ids[:, :1] if tail == "bucket" else torch.zeros_like(ids[:, :1])
        padded = torch.cat([ids, other], -1), torch.cat([weights, torch.zeros_like(weights[:, :1])], -1)
        torch.testing.assert_close(sparse(z, *padded, tail), sparse(z, ids, weights, tail))
        leaf = z.detach().clone()
        leaf.scatter_(-1, other, -torch.inf)  # an id that the student masks
        keep = (ids != other).all(-1)
        leaf.requires_grad_()
        loss = sparse(leaf, *padded, tail)[keep]
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), leaf)[0].isfinite().all()


def test_a_record_of_the_whole_vocabulary_has_no_tail():
    z = torch.randn(4, 6, requires_grad=True)
    weights = torch.randn(4, 6).softmax(-1)
    loss = sparse(z, torch.arange(6).expand(4, 6), weights, "bucket")
    torch.testing.assert_close(loss, F.cross_entropy(z, weights, reduction="none"), rtol=1e-4, atol=1e-4)
    assert torch.autograd.grad(loss.sum(), z)[0].isfinite().all()


@pytest.mark.parametrize("sure", [3.0, 6.0, 10.0, 14.0, 18.0, 30.0])
@pytest.mark.parametrize("left", [0.1, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize(("ids", "padding"), [([0], 0), ([0], 3), (range(K), 0), (range(K), 2)])
def test_a_tail_keeps_its_digits_however_sure_the_student_is(sure, left, ids, padding):
    """Tails of 1e-2 to 1e-13 in fp32, of a teacher that leaves as little, or nothing: the gradient against fp64's."""
    hidden, weight, bias = torch.randn(N, 16), torch.randn(200, 16) / 4, torch.zeros(200)
    bias[0] = sure
    ids = torch.tensor([*ids, *[0] * padding])
    targets = (4.0 * torch.eye(len(ids))[0] + torch.rand(N, len(ids))).softmax(-1)
    targets[:, len(ids) - padding :] = 0
    targets *= (1 - left) / targets.sum(-1, keepdim=True)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def record(s, w):
        return losses.record_kl(s.candidate_logits, s.logsumexp, w.log(), s.tail_logprob)

    def soft_targets(s, w):
        return losses.soft_targets(s.candidate_logits, s.logsumexp, w, tail_logprob=s.tail_logprob)

    def dense(w):
        exact = [x.detach().double().requires_grad_() for x in leaves]
        logp = F.linear(*exact).log_softmax(-1)
        inside = torch.zeros(200, dtype=torch.bool).scatter(0, ids, True)
        tail = logp.masked_fill(inside, -torch.inf).logsumexp(-1)
        loss = (-(w * logp[:, ids]).sum(-1) - (1 - w.sum(-1)).clamp_min(0) * tail).mean()
        return loss, torch.autograd.grad(loss, exact)

    def entropy(w):
        return torch.special.entr(torch.cat([w, 1 - w.sum(-1, keepdim=True).clamp_max(1)], -1)).sum(-1).mean()

    value, exact = dense(targets.double())
    for of in (soft_targets, record):
        options = {"inputs": (targets,), "candidates": ids.expand(N, -1), "want": ("logsumexp", "tail_logprob")}
        loss = token_loss(of, hidden, LMHead(weight, bias), **options)
        sought = value if of is soft_targets else value - entropy(targets.double())
        torch.testing.assert_close(loss.double(), sought, rtol=5e-6, atol=1e-12 if of is soft_targets else 2e-6)
        for ours, theirs in zip(torch.autograd.grad(loss, leaves), exact, strict=True):
            assert (ours.double() - theirs).norm() <= 2e-5 * theirs.norm() + 1e-14


def test_an_id_of_weight_0_is_an_outcome():
    """Which may be likely for the student: so it is no padding, and the others do not have all that the tail leaves."""
    z = torch.tensor([[3.0, 3.0, 1.0, 0.0]])
    stats = token_stats(z, LMHead(torch.eye(4)), want=("logsumexp", "tail_logprob"), candidates=torch.tensor([[0, 1]]))
    loss = losses.soft_targets(
        stats.candidate_logits, stats.logsumexp, torch.tensor([[1.0, 0.0]]), tail_logprob=stats.tail_logprob
    )
    torch.testing.assert_close(loss, -z.log_softmax(-1)[:, 0])


def test_bad_input_is_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match="weights"):
        losses.soft_targets(x, torch.zeros(2), torch.zeros(2, 4), "ignore")
    with pytest.raises(ShapeError, match=r"weights must have candidate_logits' shape \(..., K\), here \(\)"):
        losses.soft_targets(x[0, 0], x[0, 0], x[0, 0], "ignore")
    with pytest.raises(ShapeError, match=r"K of 1 or more ids per token, got \(2, 0\)"):
        losses.soft_targets(x[:, :0], torch.zeros(2), x[:, :0], "ignore")
    with pytest.raises(ShapeError, match="logsumexp"):
        losses.soft_targets(x, torch.zeros(3), x, "ignore")
    with pytest.raises(ShapeError, match="tail_logprob"):
        losses.soft_targets(x, torch.zeros(2), x, tail_logprob=x)
    with pytest.raises(OptionError, match=r"tail=.bucket. needs tail_logprob=stats\.tail_logprob: add"):
        losses.soft_targets(x, torch.zeros(2), x)
    with pytest.raises(OptionError, match="tail"):
        losses.soft_targets(x, torch.zeros(2), x, "drop")  # type: ignore[arg-type]
