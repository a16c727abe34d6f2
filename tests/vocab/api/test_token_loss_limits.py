"""`token_loss` at its limits: captured tensors, wrong losses, no tokens, constant losses, no gradients."""

import pytest
import torch
from torch import nn

from logitless.errors import DtypeError, GradientError, ShapeError
from tests.support.vocab.comparing import EVERYTHING, operands
from tests.support.vocab.token_losses import (
    CHUNK,
    PPO_WANT,
    REDUCTIONS,
    assert_same,
    call,
    check,
    grads,
    leaves_of,
    ppo,
    rollout,
)

CAPTURED = {
    "parameter": lambda p: p,
    "computed": lambda p: p.exp() + 1,
    "reshaped": lambda p: p.expand(1, 1)[0, 0],
}


@pytest.mark.parametrize("budget", [None, CHUNK])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("how", CAPTURED)
def test_captured_tensor_that_requires_grad(how, reduction, budget, backend):
    """Its gradient would be lost; as an input it is not."""
    ops, _ = rollout()
    captured = CAPTURED[how](nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    options = {"reduction": reduction, "memory_budget": budget, "backend": backend}
    with pytest.raises(GradientError, match=r"captured .*inputs=") as caught:
        call(lambda s: captured * s.logprob, ops, **options)
    assert "\n" not in str(caught.value)
    with torch.no_grad():
        call(lambda s: captured * s.logprob, ops, **options)
    call(lambda s: captured.detach() * s.logprob, ops, **options)
    check(lambda s, a: a * s.logprob, ops, (captured.expand(7).detach().requires_grad_(),), **options)


def test_captured_tensor_with_everything_else_frozen(backend):
    captured = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ops, _ = rollout()
    with pytest.raises(GradientError, match="captured"):
        call(lambda s: captured * s.logprob, ops.training(), backend=backend)


def test_captured_tensor_in_a_later_chunk(backend):
    ops, _ = rollout()
    captured = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    calls = []

    def from_the_second_on(s):
        calls.append(1)
        return s.logprob * (captured if len(calls) > 1 else 1)

    with pytest.raises(GradientError, match="captured"):
        call(from_the_second_on, ops, memory_budget=1, backend=backend)


def test_captured_tensor_keeps_its_gradient_without_reduction(backend):
    ops, _ = rollout()
    captured = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    each = call(lambda s: captured * s.logprob, ops, reduction="none", backend=backend)
    (grad,) = torch.autograd.grad(each.sum(), captured)
    torch.testing.assert_close(grad, each.detach().sum() / 2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda s: s.logprob.mean(), r"\(\)"),
        (lambda s: s.logprob[:, None], r"\(\d, 1\)"),
        (lambda s: s.logprob[:1], r"\(1,\)"),
        (lambda s: 3.0, "float"),
        (lambda s: None, "NoneType"),
    ],
)
def test_a_loss_that_is_not_one_number_per_token(wrong, got, reduction, backend):
    ops, _ = rollout()
    with pytest.raises(
        ShapeError, match=rf"loss_fn: expected one loss per token, shape \(\d,\), got .*{got}"
    ) as caught:
        call(wrong, ops, reduction=reduction, backend=backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lead", [(5,), (2, 0), (0,)])
def test_no_token_that_counts(lead, reduction, backend):
    ops = operands(lead)
    ops.labels.fill_(-100)
    inputs = tuple(torch.randn(lead, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = call(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, backend=backend)
    assert loss.shape == (lead if reduction == "none" else ())
    assert loss.eq(0).all()
    (loss.sum() * 3).backward()
    for x in leaves_of(ops, inputs):
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert x.grad.eq(0).all()


def test_no_token_at_all_without_labels(backend):
    ops = operands((0,))
    ops.labels = None
    loss = call(lambda s: s.entropy, ops, want=("entropy",), backend=backend)
    assert loss == 0
    assert all(g.eq(0).all() for g in grads(loss, ops))


@pytest.mark.parametrize("budget", [None, CHUNK])
def test_a_loss_of_the_inputs_alone(budget, backend):
    ops, (weights, _) = rollout()
    loss = call(lambda s, w: w.square(), ops, (weights,), memory_budget=budget, backend=backend)
    *rest, found = grads(loss, ops, (weights,))
    assert all(g.eq(0).all() for g in rest)
    counted = (ops.labels != -100).double()
    torch.testing.assert_close(found, 2 * weights.detach() * counted / 5)


@pytest.mark.parametrize("budget", [None, CHUNK])
def test_a_constant_loss_keeps_a_live_graph(budget, backend):
    ops, (weights, _) = rollout()
    options = {"memory_budget": budget, "backend": backend}
    loss = call(lambda s, w: torch.full_like(s.logprob.detach(), 2.5), ops, (weights,), **options)
    assert loss == 2.5
    assert all(g.eq(0).all() for g in grads(loss, ops, (weights,)))


def test_an_unused_statistic_gets_no_gradient(backend):
    ops, _ = rollout()
    alone = call(lambda s: -s.logprob, ops, backend=backend)
    beside = call(lambda s: -s.logprob, ops, want=("logprob", "entropy", "max_logit", "rank"), top_k=3, backend=backend)
    assert_same(grads(beside, ops), grads(alone, ops))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivatives_are_refused(reduction, backend):
    ops, inputs = rollout()
    loss = call(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, backend=backend).sum()
    with pytest.raises(GradientError, match="create_graph=True") as caught:
        grads(loss, ops, inputs, create_graph=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_gradients(reduction, backend):
    ops, inputs = rollout()
    expected = call(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, backend=backend)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = call(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, backend=backend)
        assert not got.requires_grad
        assert_same([got], [expected.detach()])


def test_operands_and_inputs_are_never_written_to(backend):
    ops, inputs = rollout()
    before = [x.detach().clone() for x in leaves_of(ops, inputs)]
    loss = call(ppo, ops, inputs, want=PPO_WANT, backend=backend)
    (loss * 2).backward()
    assert_same([x.detach() for x in leaves_of(ops, inputs)], before, 0.0)


@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("transform", [{}, {"softcap": 4.0}], ids=str)
def test_what_the_loss_changes_in_place_is_its_own(transform, reduction, ignored, backend):
    """Neither the gradient nor the caller's inputs see what a loss writes into its arguments."""
    ops, (weights, _) = rollout(reference=True, **transform)
    if not ignored:
        ops.labels = ops.labels.clamp_min(0)
    fixed, ids = torch.rand(7, dtype=torch.float64), torch.randint(23, (7, 2))

    def plain(s, w, fixed, ids):
        single = sum(x for x in vars(s).values() if x.dim() == 1)
        return single + s.top_k_logits.sum(-1) + s.candidate_logits.sum(-1) + w + fixed

    def spoiling(s, w, fixed, ids):
        loss = plain(s, w, fixed, ids)
        for x in (*vars(s).values(), w, fixed, ids):
            # what the reduction "none" hands out is the pass's own result, which autograd guards
            if reduction != "none" or not x.requires_grad:
                x.detach().fill_(3)
        return loss

    options = {"want": EVERYTHING, "top_k": 2, "candidates": torch.randint(23, (7, 2)), "reduction": reduction}
    results = []
    for loss_fn in (plain, spoiling):
        given = (weights, fixed.clone(), ids.clone())
        loss = call(loss_fn, ops, given, backend=backend, **options)
        for _ in range(2):
            found = grads(loss.sum(), ops, (weights,), retain_graph=True)
        results.append([loss.detach(), *found, *given[1:], weights.detach().clone()])
    assert_same(results[1], results[0], 0.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_complex_loss(reduction, backend):
    ops, _ = rollout()
    with pytest.raises(DtypeError, match=r"loss_fn: expected a real loss .*complex128.*\.real"):
        call(lambda s: s.logprob + 1j, ops, reduction=reduction, backend=backend)
