"""Numbers that do not change where all logits share an offset keep their digits."""

import pytest
import torch

import logitless as ll
from logitless.logits import chunked_self_certainty, per_token_logps
from tests.support.vocab.comparing import assert_near, assert_near_in_norm


@pytest.mark.parametrize("offset", [0, 1_000, 10**8])
def test_an_offset_takes_no_digits(offset, backend):
    z = torch.randn(12, 700).mul(64).round() / 64 if offset < 10**8 else torch.randn(12, 700).sign() * 8
    labels, names = torch.arange(12), ("logprob", "entropy", "sum_sq_prob")
    head = ll.LMHead(torch.cat([z.T, torch.full((700, 1), float(offset))], 1))
    hidden = torch.cat([torch.eye(12), torch.ones(12, 1)], 1).requires_grad_()
    exact = z.double().requires_grad_()
    logp = exact.log_softmax(-1)
    expected = {"logprob": logp[labels, labels], "entropy": -(logp.exp() * logp).sum(-1)}
    expected["sum_sq_prob"] = logp.exp().square().sum(-1)
    got = ll.token_stats(hidden, head, labels, want=names, memory_budget=30_000, backend=backend)
    loss = ll.linear_cross_entropy(hidden, head, labels, reduction="none", backend=backend)
    for name, found in [*((name, getattr(got, name)) for name in names), ("logprob", -loss)]:
        assert_near(found, expected[name], 1e-6, name)
        (ours,) = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
        (theirs,) = torch.autograd.grad(expected[name].sum(), exact, retain_graph=True)
        assert_near_in_norm(ours[:, :12], theirs @ z.double().T, 2e-6, f"d {name}", floor=5e-6)


@pytest.mark.parametrize("method", ["dense", "recompute"])
@pytest.mark.parametrize("offset", [1_000, 10**8])
def test_an_offset_of_logits_takes_no_digits(offset, method):
    z = torch.randn(12, 700).sign().mul(8).requires_grad_()
    ids = torch.randint(700, (12,))
    exact = z.detach().double().requires_grad_()
    expected = exact.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    got = per_token_logps(z + offset, ids, method=method)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    ours, wanted = (torch.autograd.grad(x.sum(), y)[0] for x, y in ((got, z), (expected, exact)))
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-7)


def test_an_offset_of_logits_takes_no_slope_from_self_certainty():
    z = torch.randn(12, 700).sign().mul(8).requires_grad_()
    exact = z.detach().double().requires_grad_()
    slopes = [torch.autograd.grad(chunked_self_certainty(x + 10**6, 100).sum(), x)[0] for x in (z, exact)]
    torch.testing.assert_close(slopes[0].double(), slopes[1], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("offset", [0, 1_000, 10**6])
def test_a_record_keeps_the_digits_that_its_fields_have(offset):
    z = torch.randn(12, 700).mul(16).round() / 16
    head = ll.LMHead(torch.cat([z.T, torch.full((700, 1), float(offset))], 1))
    record = ll.sample_tokens(torch.cat([torch.eye(12), torch.ones(12, 1)], 1), head, temperature=0.7, keep=3)
    logp = z.double().log_softmax(-1)
    rounding = 2.0**-22 * (offset + 20)
    for got, exact in (
        (record.logprob, logp.gather(1, record.token.long()[:, None])[:, 0]),
        (record.topk_logprob, logp.topk(3).values),
        (record.behaviour_logprob, (z.double() / 0.7).log_softmax(-1).gather(1, record.token.long()[:, None])[:, 0]),
    ):
        assert float((got - exact).abs().max()) <= 2 * rounding
