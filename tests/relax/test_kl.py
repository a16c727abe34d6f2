"""KL to the reference, step by step: exact, zero for an unchanged policy, differentiable for the policy."""

import pytest
import torch

import logitless as ll
from logitless import relax
from logitless.errors import DtypeError, OptionError, ShapeError
from tests.support.vocab.comparing import assert_near_in_norm, operands
from tests.support.vocab.refusing import refused

B, T, H, V = 3, 4, 6, 31


def dense_kl(hidden, head, reference):
    logp = (hidden.double() @ head.weight.double().T + head.bias.double()).log_softmax(-1)
    logq = (reference[0].double() @ reference[1].weight.double().T + reference[1].bias.double()).log_softmax(-1)
    return (logp.exp() * (logp - logq.detach())).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sum_over_steps(dtype):
    ops = operands((B, T), H, V, dtype=dtype, reference=True)
    alive = torch.rand(B, T) < 0.7
    alive[0] = False
    total = None
    for t in range(T):
        total = relax.online_kl(
            ops.hidden[:, t],
            ops.head,
            (ops.ref.hidden[:, t], ops.ref.head),
            total=total,
            alive=alive[:, t],
            lengths=(t, t),
        )
    exact = ops.to(torch.float64)
    expected = (alive * dense_kl(exact.hidden, exact.head, exact.reference)).sum(1)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    assert total.dtype == dtype
    assert_near_in_norm(total.detach(), expected.detach(), tolerance)
    assert float(total[0].detach()) == 0.0
    found = torch.autograd.grad(total.sum(), list(ops.leaves.values()))
    wanted = torch.autograd.grad(expected.sum(), list(exact.leaves.values()))
    for got, want in zip(found, wanted, strict=True):
        assert_near_in_norm(got, want, 2 * tolerance)
    assert ops.ref.hidden.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_unchanged_policy_is_at_zero(dtype):
    """Step 0 of a run: exactly 0, with and without finished sequences, and no gradient."""
    ops = operands((B,), H, V, dtype=dtype)
    for alive in (None, torch.tensor([True, False, True])):
        kl = relax.online_kl(ops.hidden, ops.head, (ops.hidden.detach().clone(), ops.head), alive=alive)
        assert torch.equal(kl, torch.zeros_like(kl))
        (grad,) = torch.autograd.grad(kl.sum(), ops.hidden)
        assert float(grad.abs().max()) < 1e-6


def test_a_reference_one_token_ahead_is_far_away_and_refused():
    ops = operands((B, T), H, V)
    late = relax.online_kl(ops.hidden[:, 0], ops.head, (ops.hidden[:, 1], ops.head))
    assert float(late.detach().min()) > 0.5
    twice = relax.online_kl(ops.hidden[:, 0], ops.head, (ops.hidden[:, 1], ops.head), total=late)
    torch.testing.assert_close(twice, 2 * late)
    call = (ops.hidden[:, 0], ops.head, (ops.hidden[:, 1], ops.head))
    refused(OptionError, lambda: relax.online_kl(*call, lengths=(5, 6)), "policy 5 and reference 6", "same next token")


def test_what_is_refused():
    hidden, head = torch.randn(B, H), ll.LMHead(torch.randn(V, H))
    other = ll.LMHead(torch.randn(V + 1, H))
    refused(ShapeError, lambda: relax.online_kl(hidden, head, (hidden, other)), "same vocabulary", "set vocab_size")
    refused(
        ShapeError, lambda: relax.online_kl(hidden, head, (hidden, head), total=torch.zeros(B, 1)), "total", "(3, 1)"
    )
    refused(DtypeError, lambda: relax.online_kl(hidden, head, (hidden, head), alive=torch.ones(B)), "alive", ".bool()")
    refused(DtypeError, lambda: relax.online_kl([1.0], head, (hidden, head)), "hidden: expected a floating", "list")
    for name in ("total", "alive"):
        own = {name: [True] * B}
        refused(DtypeError, lambda: relax.online_kl(hidden, head, (hidden, head), **own), f"{name}: expected", "list")  # noqa: B023
