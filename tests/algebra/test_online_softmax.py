"""Accumulations of parts of a vocabulary merge, in any order, to that of the whole."""

import itertools

import pytest
import torch

from logitless.algebra.online_softmax import EMPTY, Accumulation, finish, merge, rebase, single, total_names
from logitless.algebra.stats import STATISTICS, sums_of
from logitless.vocab.call.call import Needs
from logitless.vocab.call.validate import flatten
from logitless.vocab.head.lm_head import LMHead
from logitless.vocab.passes.engine import checked, values
from logitless.vocab.passes.price import stats_price

N, V = 6, 40


def accumulation_of(z, z_ref, shift):
    """The accumulation of a part by its definition: every sum spelt out; what lies above 1 is no candidate."""
    m, m_ref = z.amax(1), z_ref.amax(1)
    tail = z > 1
    m_tail = torch.where(tail, z, EMPTY).amax(1)
    w, w_ref = (z - m[:, None]).exp(), (z_ref - m_ref[:, None]).exp()
    e = z - z_ref - shift[:, None]
    return Accumulation(
        m=m,
        rest=w.sum(1) - 1,
        t=(w * (z - m[:, None])).sum(1),
        r=w.square().sum(1),
        above=(z > 0.3).sum(1),
        m_ref=m_ref,
        s_ref=w_ref.sum(1),
        near=(z + z_ref).amax(1),
        shift=shift,
        a=(w * e).sum(1),
        b=(w * torch.expm1(-e)).sum(1),
        a_ref=(w_ref * e).sum(1),
        m_tail=m_tail,
        s_tail=torch.where(tail, (z - m_tail[:, None]).exp(), 0.0).sum(1),
    )


def logits(spread=3.0):
    return spread * torch.randn(2, N, V, dtype=torch.float64)


def assert_same(x: Accumulation, y: Accumulation):
    for name, value in x.items():
        torch.testing.assert_close(value, getattr(y, name), rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("cuts", [(1,), (17,), (39,), (3, 4, 30), (10, 20, 30)])
@pytest.mark.parametrize("backwards", [False, True])
def test_parts_merge_to_the_whole(cuts, backwards):
    z, z_ref = logits()
    shift = torch.randn(N, dtype=torch.float64)
    bounds = [0, *cuts, V]
    parts = [
        accumulation_of(z[:, a:b], z_ref[:, a:b], shift + i)  # every part measured from a d0 of its own
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    if backwards:
        parts.reverse()
    total = parts[0]
    for part in parts[1:]:
        total = merge(total, part, torch)
    assert_same(total, accumulation_of(z, z_ref, total.shift))
    nearest = [(z + z_ref)[:, a:b].amax(1) for a, b in itertools.pairwise(bounds)]
    part = torch.stack(nearest).argmax(0)
    torch.testing.assert_close(total.shift, shift + part)


def test_merge_is_associative():
    z, z_ref = logits(30.0)
    zero = torch.zeros(N, dtype=torch.float64)
    a, b, c = (accumulation_of(z[:, s], z_ref[:, s], zero) for s in (slice(0, 9), slice(9, 10), slice(10, V)))
    assert_same(merge(merge(a, b, torch), c, torch), merge(a, merge(b, c, torch), torch))


def test_an_entry_is_a_part():
    z, z_ref = logits()
    shift = torch.randn(N, dtype=torch.float64)
    others = accumulation_of(z[:, 1:], z_ref[:, 1:], shift)
    one = single(z[:, 0], z_ref[:, 0], others, torch)
    one.above = (z[:, 0] > 0.3).long()
    own = accumulation_of(z[:, :1], z_ref[:, :1], shift)
    one.m_tail, one.s_tail = own.m_tail, own.s_tail
    whole = merge(others, one, torch)
    assert_same(whole, accumulation_of(z, z_ref, whole.shift))


@pytest.mark.parametrize("far", [0.0, 50.0, 90.0, 1e4, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_entry_far_away_takes_digits(far, dtype):
    """A part that the policy, the reference or both mask merges with any other, in any order."""
    z, z_ref = logits(1.0)
    for masked in ((z,), (z_ref,), (z, z_ref)):
        for cut in (1, 20):
            x, x_ref = (y.clone() for y in (z, z_ref))
            for y in (x if any(m is z for m in masked) else None, x_ref if any(m is z_ref for m in masked) else None):
                if y is not None:
                    y[:, :cut] -= far
            parts = []
            for s in (slice(0, cut), slice(cut, V)):
                at = (x + x_ref)[:, s].argmax(1, keepdim=True)
                own = (x - x_ref)[:, s].gather(1, at)[:, 0]
                parts.append(accumulation_of(*(y[:, s].to(dtype) for y in (x, x_ref)), own.to(dtype)))
            p, q = x.log_softmax(1), x_ref.log_softmax(1)
            for two in (parts, parts[::-1]):
                got = finish(merge(*two, torch), None, torch)
                tolerance = 1e-9 if dtype == torch.float64 else 3e-6
                for name, a, b in (("kl", p, q), ("reverse_kl", q, p)):
                    expected = (a.exp() * (a - b)).sum(1)
                    torch.testing.assert_close(
                        getattr(got, name).double(),
                        expected,
                        rtol=tolerance,
                        atol=tolerance,
                        msg=lambda m, n=name: n + m,
                    )


def test_rebase_moves_the_origin_of_the_differences():
    z, z_ref = logits()
    here, there = torch.randn(2, N, dtype=torch.float64)
    assert_same(rebase(accumulation_of(z, z_ref, here), there, torch), accumulation_of(z, z_ref, there))


def test_totals_are_the_statistics():
    z, z_ref = logits()
    logp, logq = z.log_softmax(1), z_ref.log_softmax(1)
    others = accumulation_of(z[:, 1:], z_ref[:, 1:], torch.randn(N, dtype=torch.float64))
    got = finish(others, (z[:, 0], z_ref[:, 0]), torch)
    p, q = logp.exp(), logq.exp()
    expected = {
        "logprob": logp[:, 0],
        "logsumexp": z.logsumexp(1),
        "entropy": -(p * logp).sum(1),
        "sum_sq_prob": p.square().sum(1),
        "kl": (p * (logp - logq)).sum(1),
        "reverse_kl": (q * (logq - logp)).sum(1),
    }
    torch.testing.assert_close(got.m_ref + got.log_s_ref, z_ref.logsumexp(1))
    for name, value in expected.items():
        torch.testing.assert_close(getattr(got, name), value, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


CALLS = [
    (want, label)
    for want in [*((name,) for name in STATISTICS), tuple(STATISTICS)]
    for label in (False, True)
    if label or not any(STATISTICS[name].needs_label for name in want)
]


@pytest.mark.parametrize(("want", "label"), CALLS)
def test_total_names_are_the_fields_that_a_pass_fills(want, label):
    hidden, weight = torch.randn(5, 4), torch.randn(9, 4)
    ref = (torch.randn(5, 4), LMHead(torch.randn(9, 4))) if any(STATISTICS[n].needs_reference for n in want) else None
    labels = torch.arange(5) if label else None
    candidates = torch.zeros(5, 2, dtype=torch.int64)
    call = flatten(hidden, LMHead(weight), labels, want=want, reference=ref, candidates=candidates)
    price = stats_price(call, Needs(True, True, False))
    _, saved = values(checked(call, price), save=True)
    assert sorted(saved.totals) == sorted(total_names(sums_of(want), label))


def test_sums_that_are_not_made_are_absent():
    assert [name for name, _ in Accumulation(m=torch.zeros(1), rest=torch.zeros(1)).items()] == ["m", "rest"]
