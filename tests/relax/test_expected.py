"""The mean embedding against dense float64: values, gradients, the same call's sample, price and memory."""

import pytest
import torch

import logitless as ll
from logitless.errors import DtypeError, GradientError, OptionError, ShapeError
from logitless.relax import Noise, expected_embedding
from logitless.vocab.reference import dense_logits
from tests.support.vocab.comparing import assert_near_in_norm, operands
from tests.support.vocab.measuring import measure

D = 9
FORMS = [{}, {"bias": False, "scale": 0.5, "vocab_size": 90}, {"softcap": 3.0, "ranks": (2, 1)}]


def dense(ops, table, temperature):
    """(softmax(z) · E, entropy) in float64."""
    logp = dense_logits(ops.hidden, ops.head, temperature).log_softmax(-1)
    return logp.exp() @ table[: logp.shape[-1]], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("budget", [None, 10_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_and_gradients_are_dense_ones(form, dtype, budget):
    ops = operands((3, 4), 6, 101, dtype=dtype, **form)
    table = torch.randn(101, D).to(dtype).requires_grad_()
    found = expected_embedding(ops.hidden, ops.head, table, temperature=0.7, memory_budget=budget)
    exact, whole = ops.to(torch.float64), table.detach().double().requires_grad_()
    expected = dense(exact, whole, 0.7)
    up = [torch.randn(x.shape, dtype=torch.float64) for x in expected]
    wanted = torch.autograd.grad(expected, [*exact.leaves.values(), whole], up)
    outputs = [found.embedding, found.entropy]
    got = torch.autograd.grad(outputs, [*ops.leaves.values(), table], [u.to(dtype) for u in up])
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    for one, other, name in zip(outputs, expected, ("embedding", "entropy"), strict=True):
        assert one.dtype == dtype
        assert_near_in_norm(one.detach(), other.detach(), tolerance, name)
    for one, other, name in zip(got, wanted, (*ops.leaves, "table"), strict=True):
        assert_near_in_norm(one, other, 2 * tolerance, name)


def test_a_tied_embedding_has_both_gradients():
    ops = operands((5,), 6, 40, bias=False)
    (got,) = torch.autograd.grad(expected_embedding(ops.hidden, ops.head).embedding.square().sum(), ops.weight)
    (wanted,) = torch.autograd.grad(dense(ops, ops.weight, 1.0)[0].square().sum(), ops.weight)
    torch.testing.assert_close(got, wanted)


def test_the_same_call_samples_and_finds_the_best():
    ops = operands((2, 6), 5, 300, dtype=torch.float32).training()
    noise = Noise(torch.arange(2)[:, None], torch.arange(6))
    found = [
        expected_embedding(ops.hidden, ops.head, temperature=0.8, noise=noise, memory_budget=b) for b in (None, 20_000)
    ]
    drawn = ll.sample_tokens(ops.hidden, ops.head, temperature=0.8, noise=noise)
    stats = ll.token_stats(ops.hidden, ops.head, want=("entropy",), top_k=1, temperature=0.8)
    for each in found:
        assert torch.equal(each.token, drawn.token)
        assert torch.equal(each.argmax, stats.top_k_ids[..., 0])
        torch.testing.assert_close(each.entropy, stats.entropy)


def test_impossible_entries_and_ties():
    ops = operands((4,), 5, 30, dtype=torch.float64)
    with torch.no_grad():
        ops.bias[:7] = -torch.inf
        ops.bias[20] = ops.bias[8]
        ops.weight[20] = ops.weight[8]
        ops.bias[[8, 20]] += 50
    ops = ops.training("hidden")
    found = expected_embedding(ops.hidden, ops.head, torch.eye(30, dtype=torch.float64), memory_budget=4_000)
    p = dense_logits(ops.hidden, ops.head).softmax(-1)
    torch.testing.assert_close(found.embedding, p)
    assert (found.argmax == 8).all()
    (got,) = torch.autograd.grad(found.entropy.sum(), ops.hidden)
    assert got.isfinite().all()


def test_a_draw_from_double_precision_is_of_it():
    """Logits that are alike in float32: the noise alone would decide."""
    ops = operands((2, 6), 5, 300, dtype=torch.float64).training()
    with torch.no_grad():
        ops.bias += 1e8
    noise = Noise(torch.arange(2)[:, None], torch.arange(6))
    drawn = ll.sample_tokens(ops.hidden, ops.head, noise=noise)
    assert torch.equal(expected_embedding(ops.hidden, ops.head, noise=noise).token, drawn.token)


def test_without_noise_no_random_number_is_drawn():
    ops, before = operands((3,), 5, 30), torch.get_rng_state()
    assert expected_embedding(ops.hidden, ops.head).token is None
    assert torch.equal(torch.get_rng_state(), before)


def test_no_token():
    ops = operands((0,), 5, 30)
    found = expected_embedding(ops.hidden, ops.head, generator=torch.Generator())
    assert found.embedding.shape == (0, 5)
    found.embedding.sum().backward()
    assert found.token.shape == (0,)
    assert expected_embedding(ops.hidden, ops.head).token is None


@pytest.mark.parametrize("trained", [True, False])
def test_flop_and_memory(trained):
    n, h, v, d, budget = 128, 16, 20_000, 24, 2 << 20
    hidden, weight = torch.randn(n, h, requires_grad=trained), torch.randn(v, h, requires_grad=trained)
    table = torch.randn(v, d)

    def step():
        found = expected_embedding(hidden, ll.LMHead(weight), table, memory_budget=budget)
        if trained:
            torch.autograd.grad(found.embedding.sum() + found.entropy.sum(), [hidden, weight])

    seen = measure(step, memory=True)
    forward = 2 * n * v * (h + d)
    assert seen.flops == forward + trained * (forward + 2 * 2 * n * v * h)
    gradients = trained * 4 * (2 * v * h + 2 * n * h)
    assert seen.peak < budget + gradients + 4 * n * (3 * d + 40)
    assert n * v * 4 > 4 * budget


def test_refusals():
    ops = operands((4,), 5, 30)
    with pytest.raises(ShapeError, match=r"embedding: expected \(30, width\)"):
        expected_embedding(ops.hidden, ops.head, torch.zeros(29, 3))
    with pytest.raises(OptionError, match=r"temperature: expected a number in 1e-24\.\.1e\+26, got 1e-38"):
        expected_embedding(ops.hidden, ops.head, temperature=1e-38)
    low = ll.LMHead(torch.tensor([[-2e5], [-1e5]]))
    assert expected_embedding(torch.ones(1, 1), low, torch.eye(2), temperature=1e-24).embedding.tolist() == [[0.0, 1.0]]
    for table in (None, torch.zeros(30, 3)):
        found = expected_embedding(ops.hidden, ops.head, table)
        for result in (found.embedding, found.entropy):
            with pytest.raises(GradientError, match="create_graph=True"):
                torch.autograd.grad(result.sum(), ops.hidden, create_graph=True)
    with pytest.raises(OptionError, match=r"temperature: expected a number in 1e-24\.\.1e\+26, got 0"):
        expected_embedding(ops.hidden, ops.head, temperature=0)
    with pytest.raises(DtypeError, match="hidden: expected a floating-point tensor, got list"):
        expected_embedding([1.0], ops.head)
