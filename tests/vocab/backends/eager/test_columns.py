"""Slices that lie in columns: where few tokens' products are the faster for it, with the same numbers."""

from types import SimpleNamespace

import pytest
import torch

import logitless as ll
from logitless.vocab.backends.chunk import Scratch
from logitless.vocab.backends.compiled import stream
from logitless.vocab.backends.eager import backend, threads
from logitless.vocab.reference import dense_logits
from tests.support.switches import put_back
from tests.support.vocab.comparing import PAIRED, assert_near_in_norm, compare, compare_loss, operands

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


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=[pytest.mark.compiled, pytest.mark.slow])])
@pytest.mark.parametrize("want", [("logprob", "entropy"), ("logprob", "kl"), ("jsd",)], ids=str)
def test_logits_that_a_gradient_needs_again_lie_in_columns(want, backend, monkeypatch):
    asked = lying(monkeypatch)
    compare_loss(problem(reference=True), want, backend=backend, **FEW)
    assert asked
    assert all(asked)


def test_many_tokens_and_what_is_sorted_given_or_has_no_gradient_lie_in_rows(monkeypatch):
    asked = lying(monkeypatch)
    cross_entropy(problem(80, 70))
    ops = problem(reference=True)
    for want, top_k in ((("logprob",), 3), (("logprob", "kl"), 0)):
        compare(ops, want, top_k=top_k, backend="eager", **FEW)
    given = dense_logits(*ops.reference)  # which come in rows
    ll.token_loss(lambda s: s.kl, ops.hidden, ops.head, ops.labels, want=("kl",), reference=given, **FEW)
    assert asked
    assert not any(asked)


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=[pytest.mark.compiled, pytest.mark.slow])])
@pytest.mark.parametrize("want", [("logprob", "entropy"), ("logprob", "kl"), ("rank", "self_certainty")], ids=str)
def test_values_of_some_tokens_lie_in_columns(want, backend, monkeypatch):
    monkeypatch.setattr(stream, "takes", lambda *how, **more: False)  # in registers there are no slices
    asked = lying(monkeypatch)
    with put_back():
        torch.set_num_threads(2)
        compare(problem(152, 20_011, reference=True), want, backend=backend)
    assert asked
    assert all(asked)


@pytest.mark.parametrize(("tokens", "threads"), [(128, 2), (152, 1), (150, 2), (513, 2)])
def test_values_of_fewer_more_or_uneven_tokens_or_of_one_thread_lie_in_rows(tokens, threads, monkeypatch):
    asked = lying(monkeypatch)
    with put_back():
        torch.set_num_threads(threads)
        compare(problem(tokens), ("logprob",), backend="eager")
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


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("want", [("entropy", "kl", "rank", "sum_sq_prob"), PAIRED], ids=["alone and kl", "paired"])
def test_columns_have_the_numbers_of_float64(want, softcap, number, monkeypatch):
    """With shares of the entries for threads, and a softcap, whose derivative lies in columns, too."""
    monkeypatch.setattr(threads, "SHARE", 256)
    more = {} if softcap is None else {"softcap": softcap}
    with put_back():
        torch.set_num_threads(number)
        asked = lying(monkeypatch)
        compare_loss(problem(v=1032, reference=True, **more), want, backend="eager", **FEW)
    assert asked
    assert all(asked)
