"""The oracle itself: against torch's own losses and distributions, its gradients by finite differences."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical, kl_divergence

from logitless.vocab.reference import dense_cross_entropy, dense_logits, dense_token_stats
from tests.support.vocab.comparing import EVERYTHING, INTEGERS, operands


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def stats_of(ops, want=EVERYTHING, **options):
    return dense_token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, **options)


def test_logits_are_the_head_written_out():
    ops = operands(scale=0.7, softcap=5.0, vocab_size=19)
    z = F.linear(ops.hidden, ops.weight, ops.bias)[:, :19] * 0.7
    t = 0.5 + torch.rand(7, dtype=torch.float64)
    same(dense_logits(ops.hidden, ops.head), 5 * torch.tanh(z / 5))
    same(dense_logits(ops.hidden, ops.head, t), 5 * torch.tanh(z / 5) / t[:, None])
    assert dense_logits(ops.hidden.float(), ops.to(torch.bfloat16).head).dtype == torch.float64


@pytest.mark.parametrize("lead", [(), (7,), (2, 3)])
def test_statistics_are_those_of_torch_distributions(lead):
    ops = operands(lead, reference=True)
    p = Categorical(logits=dense_logits(ops.hidden, ops.head))
    q = Categorical(logits=dense_logits(ops.ref.hidden, ops.ref.head))
    m = Categorical(probs=0.7 * p.probs + 0.3 * q.probs)
    uniform = Categorical(probs=torch.full_like(p.probs, 1 / 23))
    z = dense_logits(ops.hidden, ops.head)
    order = z.argsort(dim=-1, descending=True)
    got = stats_of(ops, top_k=3, candidates=torch.zeros(*lead, 2, dtype=torch.int64), jsd_beta=0.3)
    same(got["logprob"], p.log_prob(ops.labels))
    same(got["entropy"], p.entropy())
    same(got["self_certainty"], kl_divergence(uniform, p))
    same(got["kl"], kl_divergence(p, q))
    same(got["reverse_kl"], kl_divergence(q, p))
    same(got["jsd"], 0.7 * kl_divergence(p, m) + 0.3 * kl_divergence(q, m))
    same(got["logsumexp"], z.exp().sum(-1).log())
    same(got["label_logit"] - got["logsumexp"], got["logprob"])
    same(got["mean_logit"], z.sum(-1) / 23)
    same(got["sum_sq_prob"], (p.probs**2).sum(-1))
    same(got["max_logit"], z.gather(-1, order[..., :1])[..., 0])
    same(got["rank"] - 1, (order == ops.labels[..., None]).int().argmax(-1))
    assert torch.equal(got["top_k_ids"], order[..., :3])
    same(got["candidate_logits"], z[..., :1].expand(*lead, 2))


def test_gradients_are_finite_differences():
    ops = operands((3,), 3, 6, reference=True, spread=1.0, scale=1.3, softcap=4.0)
    ops.labels[1] = -100
    options = {"want": EVERYTHING, "top_k": 2, "candidates": torch.tensor([[1, 1, 5]] * 3), "jsd_beta": 0.2}

    def numbers(hidden, weight, bias):
        ops.hidden, ops.weight, ops.bias = hidden, weight, bias
        stats = stats_of(ops, **options)
        return tuple(x for name, x in stats.items() if name not in INTEGERS)

    assert torch.autograd.gradcheck(numbers, (ops.hidden, ops.weight, ops.bias))


def test_ignored_tokens_are_zero_whatever_they_hold():
    ops = operands((2, 3), reference=True)
    ops.labels[0, 1] = -100
    with torch.no_grad():
        ops.hidden[0, 1] = ops.ref.hidden[0, 1] = torch.nan
    stats = stats_of(ops, top_k=2)
    assert torch.equal(stats["top_k_ids"][0, 1], torch.tensor([-1, -1]))
    assert all(x[0, 1].eq(0).all() for name, x in stats.items() if name != "top_k_ids")
    sum(x.sum() for x in stats.values()).backward()
    assert ops.hidden.grad[0, 1].eq(0).all()
    assert all(x.grad.isfinite().all() for x in ops.leaves.values())


def test_impossible_entries():
    """A logit of -inf: p = 0 adds 0 to every sum; q = 0 < p is infinitely far."""
    ops = operands((4,), v=5, reference=True)
    with torch.no_grad():
        ops.bias[3] = -torch.inf
    ops.labels[:] = 1
    stats = stats_of(ops, want=("entropy", "kl", "jsd", "reverse_kl", "sum_sq_prob"))
    assert stats["reverse_kl"].eq(math.inf).all()
    finite = [x for name, x in stats.items() if name != "reverse_kl"]
    assert all(x.isfinite().all() for x in finite)
    for grad in torch.autograd.grad(sum(x.sum() for x in finite), list(ops.leaves.values())):
        assert grad.isfinite().all()
    with torch.no_grad():
        ops.bias[3], ops.ref.bias[3] = 0.0, -torch.inf
    stats = stats_of(ops, want=("kl", "reverse_kl", "jsd"))
    assert stats["kl"].eq(math.inf).all()
    assert stats["reverse_kl"].isfinite().all()
    assert stats["jsd"].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs(reduction, smoothing):
    ops = operands((9,))
    ops.labels[[2, 5]] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}
    z = F.linear(ops.hidden, ops.weight, ops.bias)
    got = dense_cross_entropy(ops.hidden, ops.head, ops.labels, **options)
    same(got, F.cross_entropy(z, ops.labels, **options))
    lse = z.logsumexp(-1).square() * (ops.labels != -100)
    extra = {"mean": lse.sum() / 7, "sum": lse.sum(), "none": lse}[reduction]
    with_z = dense_cross_entropy(ops.hidden, ops.head, ops.labels, z_loss=0.01, **options)
    same(with_z, got + 0.01 * extra)


def test_mean_cross_entropy_over_other_counts():
    ops = operands((4,))
    total = dense_cross_entropy(ops.hidden, ops.head, ops.labels, reduction="sum")
    same(dense_cross_entropy(ops.hidden, ops.head, ops.labels, denominator=10), total / 10)
    ops.labels[:] = -100
    nothing = dense_cross_entropy(ops.hidden, ops.head, ops.labels)
    nothing.backward()
    assert nothing == 0
    assert ops.weight.grad.eq(0).all()
