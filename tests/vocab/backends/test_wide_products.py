"""Products of bf16 that come out in fp32: whether a device has them, asked once; and the numbers made of them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import logitless as ll
from logitless.vocab.backends import logits
from logitless.vocab.reference import dense_token_stats
from tests.support.vocab.comparing import assert_near, assert_near_in_norm, operands


@pytest.fixture
def asked(monkeypatch):
    """A "cuda" whose products are a CPU's, or raise what is in the list."""
    errors, ones = [], torch.ones

    def mm(a, b, out_dtype):
        if errors:
            raise errors.pop()
        return a.to(out_dtype) @ b.to(out_dtype)

    logits._multiplies_wide.cache_clear()
    monkeypatch.setattr(torch, "ones", lambda *sizes, dtype, device: ones(*sizes, dtype=dtype))
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(logits, "add_product", lambda a, b, out: out)
    yield errors
    logits._multiplies_wide.cache_clear()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["memory", "the library's memory"],
)
def test_a_full_device_is_asked_again(asked, error):
    asked.append(error)
    with pytest.raises(RuntimeError, match=str(error)[:10]):
        logits.has_out_dtype("cuda")
    assert logits.has_out_dtype("cuda")


def test_a_device_without_them_is_asked_once(asked):
    asked.append(RuntimeError("out_dtype must be the same as input dtype"))
    assert not logits.has_out_dtype("cuda")
    assert not logits.has_out_dtype("cuda")


def test_the_device_is_asked_while_a_graph_is_traced(asked, monkeypatch):
    kinds = []
    monkeypatch.setattr(logits, "add_product", lambda a, b, out: kinds.append(type(a)))
    with FakeTensorMode():
        assert logits.has_out_dtype("cuda")
    assert kinds == [torch.Tensor]


@pytest.fixture
def wide(monkeypatch):
    """A CPU with products of bf16 that come out in fp32; how many there were."""
    mm, addmm, seen = torch.mm, torch.addmm, []

    def wide_mm(a, b, *, out_dtype=None, out=None):
        if out_dtype is not None:
            assert a.dtype == b.dtype == torch.bfloat16
            seen.append(out_dtype)
            a, b = a.to(out_dtype), b.to(out_dtype)
        return mm(a, b, out=out)

    def wide_addmm(x, a, b, *, out_dtype, out):
        seen.append(out_dtype)
        return addmm(x, a.to(out_dtype), b.to(out_dtype), out=out)

    monkeypatch.setattr(logits, "_multiplies_wide", lambda device_type: True)
    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
    return seen


@pytest.mark.parametrize("temperature", [1.0, 0.7, "each"])
@pytest.mark.parametrize("head", [{}, {"scale": 0.6}, {"softcap": 5.0, "vocab_size": 29}], ids=str)
def test_numbers_of_wide_products(head, temperature, wide):
    """The scale and the temperature come after the product, whose operands stay as they are."""
    ops = operands((7,), 5, 31, dtype=torch.float32, **head).to(torch.bfloat16)
    ops.labels = torch.tensor([0, 28, -100, 3, 17, 5, 28])
    exact, want = ops.to(torch.float64), ("logprob", "entropy", "label_logit", "mean_logit", "rank")
    heat = torch.linspace(0.5, 2.0, 7) if temperature == "each" else temperature
    options = {"temperature": heat, "candidates": torch.randint(29, (7, 3))}
    got = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, memory_budget=800, backend="eager", **options)
    expected = dense_token_stats(exact.hidden, exact.head, exact.labels, want=want, **options)
    assert wide
    for name, x in expected.items():
        assert_near(getattr(got, name).detach(), x.detach().double(), 2e-5, name)
    leaves = [list(x.leaves.values()) for x in (ops, exact)]
    sums = (x.logprob.sum() + x.entropy.sum() for x in (got, ll.TokenStats(expected)))
    for found, x in zip(*(torch.autograd.grad(y, z) for y, z in zip(sums, leaves, strict=True)), strict=True):
        assert_near_in_norm(found, x, 2**-6)
