"""Slices that lie in columns: where a loss's products are the faster for it, with the same numbers."""

from types import SimpleNamespace

import pytest
import torch

import logitless as ll
from logitless.vocab.backends.base import Scratch
from logitless.vocab.backends.eager import backend
from tests.support.vocab.comparing import assert_near_in_norm, operands

FEW = {"memory_budget": 90_000}  # some ten tokens of 1,031 entries


def lying(monkeypatch):
    """What each pass from here on asks its buffers of logits for."""
    asked = []

    def take(scratch, name, like, columns=False, usual=Scratch.take):
        found = usual(scratch, name, like, columns)
        if name[0] == "z":
            assert found.t().is_contiguous() if columns else found.is_contiguous()
            asked.append(columns)
        return found

    monkeypatch.setattr(Scratch, "take", take)
    return asked


def problem(n=40, v=1031, **more):
    return operands((n,), 8, v, dtype=torch.float32, bias=False, **more).training("hidden", "weight")


def cross_entropy(ops, **options):
    return ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="eager", **options)


def test_a_loss_of_few_tokens_lies_in_columns(monkeypatch):
    asked = lying(monkeypatch)
    cross_entropy(problem(), **FEW)
    assert asked
    assert all(asked)


def test_in_rows_where_torch_multiplies_by_onednn(monkeypatch):
    asked = lying(monkeypatch)
    assert not backend.by_onednn()
    switches = SimpleNamespace(matmul=SimpleNamespace(fp32_precision="bf16"))
    monkeypatch.setattr(torch.backends, "mkldnn", switches)  # torch's own would stay changed for other tests
    assert backend.by_onednn()
    cross_entropy(problem(), **FEW)
    assert asked
    assert not any(asked)


def test_many_tokens_and_what_is_read_more_than_once_lie_in_rows(monkeypatch):
    asked = lying(monkeypatch)
    cross_entropy(problem(80, 70))
    ops = problem(reference=True)
    for want, options in ((("logprob", "entropy"), {}), (("logprob", "kl"), {"reference": ops.reference})):
        ll.token_loss(
            lambda s, want=want: -s.logprob + getattr(s, want[1]),
            ops.hidden,
            ops.head,
            ops.labels,
            want=want,
            backend="eager",
            **FEW,
            **options,
        )
    ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob",), top_k=3, backend="eager", **FEW)
    assert asked
    assert not any(asked)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
@pytest.mark.parametrize("scale", [1.0, 40.0])  # sure tokens, too
def test_columns_have_the_numbers_of_rows(options, scale, monkeypatch):
    ops = problem()
    with torch.no_grad():
        ops.hidden.mul_(scale)
    exact = ops.to(torch.float64)
    found = []
    for x, columns in ((ops, True), (ops, False), (exact, True)):
        for leaf in x.leaves.values():
            leaf.grad = None
        with monkeypatch.context() as patch:
            if not columns:
                patch.setattr(backend, "in_columns", lambda chunk, keep: False)
            loss = cross_entropy(x, **FEW, **options)
            loss.backward()
        found.append((loss.detach(), {name: leaf.grad.clone() for name, leaf in x.leaves.items()}))
    (loss, grads), (loss_of_rows, grads_of_rows), (right, right_grads) = found
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, loss_of_rows, rtol=1e-6, atol=1e-6)
    for name, g in grads.items():
        assert_near_in_norm(g, right_grads[name], 4e-6, name)
        assert_near_in_norm(grads_of_rows[name], right_grads[name], 4e-6, name)
