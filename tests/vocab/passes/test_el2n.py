"""The EL2N score: its values, that a sure token keeps its digits, and that it is a constant."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.sample import SamplingMask
from logitless.vocab.reference import dense_token_stats
from tests.support.vocab.comparing import operands

WANT = ("logprob", "sum_sq_prob", "el2n")


@pytest.mark.parametrize("transform", [{}, {"softcap": 4.0, "scale": 0.5, "vocab_size": 997, "ranks": (2,)}], ids=str)
@pytest.mark.parametrize("budget", [None, 30_000])
def test_equals_the_oracle(budget, transform, backend):
    ops = operands((9,), 6, 1009, **transform)
    ops.labels[4] = -100
    options = {"temperature": torch.rand(9, dtype=torch.float64) + 0.5}
    got = ll.token_stats(
        *(ops.hidden, ops.head, ops.labels), want=WANT, memory_budget=budget, backend=backend, **options
    )
    expected = dense_token_stats(ops.hidden, ops.head, ops.labels, want=WANT, **options)
    torch.testing.assert_close(got.el2n, expected["el2n"].detach(), rtol=1e-10, atol=0)
    assert not got.el2n.requires_grad
    assert got.logprob.requires_grad


def sure(margin):
    """Logits of which the label's leads the others, of different sizes, by about `margin`."""
    z = torch.randn(6, 40)
    labels = torch.arange(6)
    z[labels, labels] = z.amax(1) + margin
    return z, labels


@pytest.mark.parametrize("margin", [1.0, 8.0, 18.0, 40.0, 80.0])
def test_a_sure_token_keeps_its_digits(margin, backend):
    z, labels = sure(margin)
    got = ll.token_stats(z, ll.LMHead(torch.eye(40)), labels, want=("el2n",), backend=backend).el2n
    others = z.double().scatter(1, labels[:, None], -torch.inf)
    lse = z.double().logsumexp(1)
    p = (others - lse[:, None]).exp()
    expected = p.sum(1).hypot(p.norm(dim=1))
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=0)


def test_over_sampling_masks():
    ops = operands((6,), 5, 23)
    kept = torch.rand(6, 23) < 0.3
    kept[torch.arange(6), ops.labels] = True
    kept[2] = F.one_hot(ops.labels[2], 23).bool()
    mask = SamplingMask.of([row.nonzero()[:, 0].tolist() for row in kept])
    got = ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, sampling_mask=mask)
    expected = dense_token_stats(ops.hidden, ops.head, ops.labels, want=WANT, sampling_mask=mask)
    torch.testing.assert_close(got.el2n, expected["el2n"].detach(), rtol=1e-10, atol=1e-15)
    assert got.el2n[2] == 0


def test_a_loss_sees_it_as_a_constant():
    ops = operands((9,))

    def loss_fn(stats):
        assert (stats.logprob.requires_grad, stats.el2n.requires_grad) == (True, False)
        return -stats.el2n * stats.logprob

    loss = ll.token_loss(loss_fn, ops.hidden, ops.head, ops.labels, want=("logprob", "el2n"))
    exact = dense_token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "el2n"))
    expected = -(exact["el2n"].detach() * exact["logprob"]).mean()
    torch.testing.assert_close(loss, expected)
    got, wanted = (torch.autograd.grad(x, (ops.hidden, ops.weight)) for x in (loss, expected))
    torch.testing.assert_close(got, wanted)


@pytest.mark.compiled
def test_a_compiled_graph_sees_it_as_a_constant():
    ops = operands((9,))

    def step(hidden, weight, labels):
        stats = ll.token_stats(hidden, ll.LMHead(weight), labels, want=("logprob", "el2n"))
        return -(stats.el2n * stats.logprob).sum(), stats.el2n

    loss, score = torch.compile(step, backend="aot_eager", fullgraph=True)(ops.hidden, ops.weight, ops.labels)
    expected, same = step(ops.hidden, ops.weight, ops.labels)
    torch.testing.assert_close(score, same)
    leaves = ops.hidden, ops.weight
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))
    assert not score.requires_grad
