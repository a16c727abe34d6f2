"""The scores at each price: values and gradients against the dense ones, products counted, memory bounded."""

import pytest
import torch

from logitless.errors import GradientError
from logitless.integrations.trl.scores import Wanted, scores
from logitless.vocab.api import token_stats
from logitless.vocab.head.lm_head import LMHead
from tests.support.allocations import trace_allocations
from tests.support.integrations.trl.runs import Products
from tests.support.vocab.quantised import stored_blocks

B, T, H, V = 3, 11, 24, 301
ALL = ("logprob", "entropy", "mean_logit", "rank", "sum_sq_prob", "logsumexp")


def problem(trained: bool, dtype: torch.dtype = torch.float64):
    hidden = torch.randn(B, T, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=trained)
    bias = torch.randn(V, dtype=dtype, requires_grad=trained)
    targets = torch.randint(V, (B, T))
    targets[0, :4] = targets[2, -1] = -100
    return hidden, LMHead(weight, bias, softcap=9.0), targets


def dense(hidden, head, targets, temperature):
    z = hidden @ head.weight.T + head.bias
    z = head.softcap * torch.tanh(z / head.softcap) / temperature
    logp = z.log_softmax(-1)
    counted, at = targets != -100, targets.clamp(min=0)[..., None]
    out = {
        "logprob": logp.gather(-1, at)[..., 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "mean_logit": z.mean(-1),
        "rank": (z.argmax(-1) == targets).double(),
        "sum_sq_prob": logp.exp().square().sum(-1),
        "logsumexp": z.logsumexp(-1),
    }
    return {name: x.masked_fill(~counted, 0) for name, x in out.items()}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("only_logprob", [True, False])
def test_values_and_gradients(trained, equal, only_logprob):
    hidden, head, targets = problem(trained)
    wanted = Wanted(ALL, 0.7, only_logprob=only_logprob, equal_weights=equal)
    found, exact = scores(wanted, head, hidden, targets), dense(hidden, head, targets, 0.7)
    found["rank"] = (found["rank"] == 1).double()
    torch.testing.assert_close(
        {name: x.detach() for name, x in found.items()}, {name: x.detach() for name, x in exact.items()}
    )
    weights = torch.full((B, T), -0.3) if equal else torch.randn(B, T)
    leaves = [x for x in (hidden, head.weight, head.bias) if x.requires_grad]
    got = torch.autograd.grad((found["logprob"] * weights).sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad((exact["logprob"] * weights).sum(), leaves))
    assert all(found[name].requires_grad != only_logprob for name in ("entropy", "logsumexp")) or (
        trained and not equal
    )


def test_unequal_weights_are_refused_where_equal_ones_were_promised():
    hidden, head, targets = problem(trained=True)
    found = scores(Wanted(("logprob",), only_logprob=True, equal_weights=True), head, hidden, targets)
    with pytest.raises(GradientError, match="every token alike"):
        (found["logprob"] * torch.randn(B, T)).sum().backward()


@pytest.mark.parametrize("trained", [True, False])
def test_no_token_that_counts(trained):
    hidden, head, targets = problem(trained)
    wanted = Wanted(ALL, top_k=2, only_logprob=True, equal_weights=True)
    found = scores(wanted, head, hidden, targets.fill_(-100))
    found["logprob"].sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert (found["top_k_ids"] == -1).all()
    assert found["top_k_ids"].shape == (B, T, 2)


def test_the_best_entries_come_along():
    hidden, head, targets = problem(trained=True)
    found = scores(Wanted(("logprob",), top_k=3, only_logprob=True, equal_weights=True), head, hidden, targets)
    exact = scores(Wanted(("logprob",), top_k=3), head, hidden, targets)
    torch.testing.assert_close(found["top_k_ids"], exact["top_k_ids"])
    torch.testing.assert_close(found["top_k_logits"], exact["top_k_logits"])


@pytest.mark.parametrize("trained", [True, False])
def test_a_reference_is_read(trained):
    hidden, head, targets = problem(trained)
    reference = torch.randn(B, T, H, dtype=torch.float64), LMHead(torch.randn(V, H, dtype=torch.float64))
    wanted = Wanted(("logprob", "kl"), only_logprob=True, equal_weights=True)
    found = scores(wanted, head, hidden, targets, reference)
    exact = token_stats(hidden, head, targets, want=wanted.statistics, reference=reference)
    assert all(torch.equal(x, getattr(exact, name)) for name, x in found.items())
    assert found["kl"].any()


def test_a_quantised_head():
    ops = stored_blocks("Q8_0", V, (B, T), bias=False)
    exact = ops.to(torch.float64)
    wanted = Wanted(("logprob",), only_logprob=True, equal_weights=True)
    found, dense = (scores(wanted, x.head, x.hidden, x.labels)["logprob"] for x in (ops, exact))
    torch.testing.assert_close(found.double(), dense, rtol=1e-5, atol=1e-5)
    got, expected = (torch.autograd.grad(x.sum(), y.hidden)[0] for x, y in ((found, ops), (dense, exact)))
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("trained", "equal", "only_logprob", "grad", "price"),
    [
        (True, True, True, True, 3),
        (True, False, True, True, 4),
        (True, True, False, True, 4),
        (False, False, True, True, 2),
        (False, False, False, True, 3),
        (True, True, True, False, 1),
    ],
)
def test_price(trained, equal, only_logprob, grad, price):
    n, h, v = 512, 64, 4096
    hidden = torch.randn(n, h, requires_grad=True)
    head, targets = LMHead(torch.randn(v, h, requires_grad=trained)), torch.randint(v, (n,))
    targets[:4] = -100
    wanted = Wanted(("logprob", "entropy", "rank"), only_logprob=only_logprob, equal_weights=equal)
    with Products() as counted, torch.set_grad_enabled(grad):
        found = scores(wanted, head, hidden, targets)
        if grad:
            found["logprob"].sum().backward()
    assert counted.flop / (2 * n * h * v) == pytest.approx(price, rel=0.02)


@pytest.mark.parametrize("trained", [True, False])
def test_memory(trained):
    """Slices within the budget, the gradients, and at most two buffers of the hidden states' size."""
    n, h, v, budget = 1024, 32, 8192, 1 << 20
    hidden = torch.randn(n, h, requires_grad=True)
    head, targets = LMHead(torch.randn(v, h, requires_grad=trained)), torch.randint(v, (n,))
    wanted = Wanted(("logprob", "entropy", "rank"), 1.0, 0, budget, only_logprob=True, equal_weights=True)

    def step():
        scores(wanted, head, hidden, targets)["logprob"].sum().backward()

    seen = trace_allocations(step)
    assert seen.peak < 1.1 * budget + trained * 4 * v * h + 4 * 4 * n * h + 64 * n
    assert seen.peak < 4 * n * v / 8
