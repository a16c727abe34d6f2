"""Whether a device multiplies bf16 into fp32: asked once, unless the answer says nothing about it."""

import pytest
import torch

from logitless.vocab.backends import logits


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
