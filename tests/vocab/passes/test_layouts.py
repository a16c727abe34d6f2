"""Strides, several backwards, cotangents that are partial, expanded or zero; what autograd is told."""

import pytest
import torch

import logitless as ll
from logitless.vocab.reference import dense_token_stats
from tests.support.vocab.comparing import EVERYTHING, assert_near, assert_near_in_norm, compare, operands


def logprob_of(ops, backend, **options):
    return ll.token_stats(ops.hidden, ops.head, ops.labels, backend=backend, **options).logprob


def oracle_gradients(ops, cotangent):
    exact = ops.to(torch.float64)
    value = dense_token_stats(exact.hidden, exact.head, ops.labels)["logprob"]
    return torch.autograd.grad(value, list(exact.leaves.values()), cotangent)


@pytest.mark.parametrize("budget", [None, 12_000])
def test_hidden_that_is_not_contiguous(budget, backend):
    ops = operands((4, 6), 5, 211, reference=True)
    ops.hidden = ops.hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    ops.ref.hidden = ops.ref.hidden.repeat_interleave(2, -1)[..., ::2]
    ops.labels = torch.randint(211, (6, 4)).T
    ops.weight = ops.weight.detach().T.contiguous().T.requires_grad_()
    ops.bias = torch.randn(422, dtype=torch.float64)[::2].requires_grad_()
    assert not any(x.is_contiguous() for x in (ops.hidden, ops.labels, ops.weight, ops.bias, ops.ref.hidden))
    candidates = torch.randint(211, (3, 6, 4)).permute(2, 1, 0)
    compare(ops, EVERYTHING, top_k=2, candidates=candidates, memory_budget=budget, backend=backend)


@pytest.mark.parametrize("budget", [None, 1000])
def test_expanded_operands(budget, backend):
    """One hidden state and one label for every token, through stride 0: gradients add up in the source."""
    ops = operands((1,), 5, 211)
    source = ops.hidden
    up = torch.randn(8, dtype=torch.float64)
    ops.hidden, ops.labels = source.expand(8, 5), torch.tensor(3).expand(8)
    got = logprob_of(ops, backend, memory_budget=budget)
    exact = dense_token_stats(ops.hidden, ops.head, ops.labels)["logprob"]
    assert_near(got, exact, 1e-10)
    leaves = [source, ops.weight, ops.bias]
    for ours, wanted in zip(torch.autograd.grad(got, leaves, up), torch.autograd.grad(exact, leaves, up), strict=True):
        assert_near_in_norm(ours, wanted, 1e-10)


def test_cotangents_of_any_layout(backend):
    ops = operands((4, 6))
    strided = torch.randn(6, 8, dtype=torch.float64)[:, ::2].T
    for up in (
        strided,
        torch.tensor(1.7, dtype=torch.float64).expand(4, 6),
        torch.zeros(4, 6, dtype=torch.float64),
    ):
        got = torch.autograd.grad(logprob_of(ops, backend), list(ops.leaves.values()), up)
        for ours, wanted in zip(got, oracle_gradients(ops, up), strict=True):
            assert_near_in_norm(ours, wanted, 1e-10)


@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
def test_only_some_statistics_used(trainable, backend):
    """Statistics that were asked for but reach no loss send nothing back."""
    ops = operands(reference=True).training(*trainable)
    options = {"want": EVERYTHING, "top_k": 2, "reference": ops.reference, "backend": backend}
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, **options)
    for used in EVERYTHING:
        if used == "rank":
            continue
        alone = dense_token_stats(*(ops.hidden, ops.head, ops.labels), want=(used,), reference=ops.reference)[used]
        up = torch.randn(7, dtype=torch.float64)
        got = torch.autograd.grad(getattr(stats, used), list(ops.leaves.values()), up, retain_graph=True)
        wanted = torch.autograd.grad(alone, list(ops.leaves.values()), up)
        for ours, exact in zip(got, wanted, strict=True):
            assert_near_in_norm(ours, exact, 1e-10, used)


@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
@pytest.mark.parametrize("budget", [None, 1000])
def test_second_backward_with_another_cotangent(trainable, budget, backend):
    ops = operands((9,), 5, 211).training(*trainable)
    value = logprob_of(ops, backend, memory_budget=budget)
    for scale in (1.0, 1.0, -3.0):
        up = scale * torch.randn(9, dtype=torch.float64)
        got = torch.autograd.grad(value, list(ops.leaves.values()), up, retain_graph=True)
        for ours, wanted in zip(got, oracle_gradients(ops, up), strict=True):
            assert_near_in_norm(ours, wanted, 1e-10)


def test_gradients_accumulate_into_grad(backend):
    ops = operands((9,))
    for _ in range(3):
        logprob_of(ops, backend).sum().backward()
    for x, wanted in zip(ops.leaves.values(), oracle_gradients(ops, torch.ones(9)), strict=True):
        assert_near_in_norm(x.grad, 3 * wanted, 1e-10)


def test_operands_are_never_written_to(backend):
    ops = operands((9,), reference=True)
    everything = [ops.hidden, ops.weight, ops.bias, ops.labels, ops.ref.hidden, ops.ref.weight, ops.ref.bias]
    before = [(x.detach().clone(), x._version) for x in everything]
    up = torch.randn(9, dtype=torch.float64)
    kept = up.clone()
    stats = ll.token_stats(
        *(ops.hidden, ops.head, ops.labels), want=EVERYTHING, reference=ops.reference, backend=backend
    )
    torch.autograd.backward([stats.logprob, stats.entropy, stats.kl], [up, up, up])
    assert torch.equal(up, kept)
    for x, (value, version) in zip(everything, before, strict=True):
        assert torch.equal(x, value)
        assert x._version == version


def test_a_weight_changed_before_backward_is_noticed(backend):
    """As torch's own operators: a gradient from other numbers than the forward's is silently wrong."""
    ops = operands()
    value = logprob_of(ops, backend).sum()
    with torch.no_grad():
        ops.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_what_requires_grad(backend):
    ops = operands(reference=True)
    call = {"want": ("logprob", "rank", "kl"), "top_k": 2, "reference": ops.reference, "backend": backend}
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, **call)
    assert stats.logprob.requires_grad
    assert stats.kl.requires_grad
    assert stats.top_k_logits.requires_grad
    assert not stats.rank.requires_grad
    assert not stats.top_k_ids.requires_grad
    with torch.no_grad():
        assert not ll.token_stats(ops.hidden, ops.head, ops.labels, **call).logprob.requires_grad
    frozen = ops.training()
    assert not ll.token_stats(frozen.hidden, frozen.head, ops.labels, **call).logprob.requires_grad


def test_two_calls_share_one_head(backend):
    """The gradient of a sum over two calls is the sum of their gradients."""
    ops, other = operands((5,)), operands((3,))
    other.weight, other.bias = ops.weight, ops.bias
    total = logprob_of(ops, backend).sum() + 2 * logprob_of(other, backend).sum()
    exact = dense_token_stats(ops.hidden, ops.head, ops.labels)["logprob"].sum()
    exact = exact + 2 * dense_token_stats(other.hidden, other.head, other.labels)["logprob"].sum()
    leaves = [ops.hidden, other.hidden, ops.weight, ops.bias]
    for ours, wanted in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(exact, leaves), strict=True):
        assert_near_in_norm(ours, wanted, 1e-10)
