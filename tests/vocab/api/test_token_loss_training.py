"""`token_loss` in training: upstream gradients, second backwards, accumulation, loss scaling, half precision."""

import pytest
import torch

import logitless as ll
from tests.support.vocab.comparing import assert_near, assert_near_in_norm
from tests.support.vocab.token_losses import (
    CHUNK,
    PPO_WANT,
    assert_same,
    call,
    dense_loss,
    grads,
    leaves_of,
    ppo,
    rollout,
)


@pytest.mark.parametrize("factor", [3.0, -0.5, 0.0, 1e-3])
def test_upstream_gradient(factor, backend):
    ops, inputs = rollout()
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    scaled = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend) * factor, ops, inputs)
    assert_same(scaled, [factor * g for g in expected])


def test_a_term_of_a_larger_loss(backend):
    ops, inputs = rollout()
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    other = sum(x.square().sum() for x in leaves_of(ops, inputs))
    both = call(ppo, ops, inputs, want=PPO_WANT, backend=backend) / 2 + other
    assert_same(
        grads(both, ops, inputs), [g / 2 + 2 * x for g, x in zip(expected, leaves_of(ops, inputs), strict=True)]
    )


def test_gradient_flows_through_an_input_that_was_computed(backend):
    ops, (weights, _) = rollout()
    slope = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    call(lambda s, w: w * s.logprob, ops, (weights.detach() * slope,), backend=backend).backward()
    logprob = ll.token_stats(ops.hidden, ops.head, ops.labels).logprob.detach()
    torch.testing.assert_close(slope.grad, (weights.detach() * logprob).sum() / 5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("first", [1.0, 0.0, 3.0])
def test_two_backwards(first, softcap, reduction, backend):
    """The first gives the gradient away, the second forms it again: never twice, never what the first scaled."""
    ops, inputs = rollout(softcap=softcap, reference=True)

    def loss_fn(s, advantages, old):
        return ppo(s, advantages, old) + s.kl * s.max_logit + s.top_k_logits.sum(-1)

    options = {"want": (*PPO_WANT, "kl", "max_logit"), "top_k": 2, "reduction": reduction, "memory_budget": CHUNK}
    expected = grads(call(loss_fn, ops, inputs, backend=backend, **options), ops, inputs)
    loss = call(loss_fn, ops, inputs, backend=backend, **options)
    loss.backward(torch.tensor(first, dtype=torch.float64), retain_graph=True)
    assert_same([x.grad for x in leaves_of(ops, inputs)], [first * g for g in expected])
    loss.backward(retain_graph=True)
    assert_same([x.grad for x in leaves_of(ops, inputs)], [(first + 1) * g for g in expected])
    loss.backward(torch.tensor(-2.0, dtype=torch.float64))
    assert_same([x.grad for x in leaves_of(ops, inputs)], [(first - 1) * g for g in expected])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_one_leaf_at_a_time(backend):
    ops, inputs = rollout()
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    loss = call(ppo, ops, inputs, want=PPO_WANT, backend=backend)
    found = [torch.autograd.grad(loss, x, retain_graph=True)[0] for x in leaves_of(ops, inputs)]
    assert_same(found, expected)


def test_micro_batches_accumulate_to_the_batch(backend):
    ops, inputs = rollout(9)
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 9)):  # the second has no token that counts
        part = (ops.hidden[rows], ops.head, ops.labels[rows])
        options = {"want": PPO_WANT, "inputs": tuple(x[rows] for x in inputs), "reduction": "sum"}
        (ll.token_loss(ppo, *part, backend=backend, **options) / 7).backward()
    assert_same([x.grad for x in leaves_of(ops, inputs)], expected)


def test_grad_scaler(backend):
    ops, inputs = rollout(dtype=torch.float32)
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = torch.optim.SGD(leaves_of(ops, inputs), lr=1.0)
    before = ops.weight.detach().clone()
    scaler.scale(call(ppo, ops, inputs, want=PPO_WANT, backend=backend)).backward()
    scaler.unscale_(optimizer)
    assert_same([x.grad for x in leaves_of(ops, inputs)], expected, 0.0)
    scaler.step(optimizer)
    assert_same([ops.weight.detach()], [before - expected[1]], 0.0)


@pytest.mark.parametrize("what", ["operands", "inputs"])
@pytest.mark.parametrize("repeat", [1, 2])
def test_fp16_does_not_underflow_before_the_loss_scale_arrives(repeat, what, backend):
    """Gradients under fp16's smallest number, which a loss scale lifts above it."""
    ops, (weights, _) = rollout(dtype=torch.float16)
    ops, exact = ops.training(*(("hidden", "weight", "bias") * (what == "operands"))), ops.to(torch.float64)
    weights.requires_grad_(what == "inputs")
    exact = exact.training(*ops.leaves)
    exact_weights = weights.detach().double().requires_grad_(what == "inputs")

    def tiny(s, w):
        return -w * s.logprob * 2.0**-26

    expected = grads(dense_loss(tiny, exact, (exact_weights,)), exact, (exact_weights,))
    assert all(g.half().eq(0).float().mean() > 0.5 for g in expected)
    loss = call(tiny, ops, (weights,), backend=backend)
    for _ in range(repeat):
        found = grads(loss * 2.0**24, ops, (weights,), retain_graph=True)
    for x, got, want in zip(leaves_of(ops, (weights,)), found, expected, strict=True):
        assert got.dtype == x.dtype
        assert_near_in_norm(got.double() / 2.0**24, want, 2.0**-10)


def test_half_precision_loss_is_fp32(backend):
    ops, (weights, _) = rollout(dtype=torch.bfloat16)
    loss = call(lambda s, w: -w * s.logprob, ops, (weights.detach(),), backend=backend)
    assert loss.dtype == torch.float32
    exact = ops.to(torch.float64)
    expected = dense_loss(lambda s, w: -w.double() * s.logprob, exact, (weights.detach(),))
    assert_near(loss.detach(), expected.detach(), 2e-5)
    for got, want in zip(grads(loss, ops), grads(expected, exact), strict=True):
        assert got.dtype == torch.bfloat16
        assert_near_in_norm(got, want, 2.0**-7)
