"""`gradient_share` against whole logits in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from logitless.diagnostics import gradient_share
from logitless.errors import LabelError
from logitless.vocab.head.sparse import SparseBackward
from logitless.vocab.reference import dense_logits
from tests.support.vocab.comparing import operands
from tests.support.vocab.measuring import measure
from tests.support.vocab.quantised import stored_blocks


def dense_share(hidden, head, labels, temperature=1.0):
    hidden = hidden.detach().double().requires_grad_()
    z = dense_logits(hidden, head, temperature)
    at_label = labels[..., None]
    g = z.detach().softmax(-1).scatter(-1, at_label, 0.0)
    g = g.scatter(-1, at_label, -g.sum(-1, keepdim=True))  # p - 1, which has no digits where p is nearly 1
    (reached,) = torch.autograd.grad(z, hidden, g)
    return reached.norm(dim=-1) / g.norm(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "transform",
    [{}, {"softcap": 4.0, "scale": 0.5, "vocab_size": 1001}, {"ranks": (2, 3), "bias": False}, {"scale": -2.0}],
    ids=str,
)
@pytest.mark.parametrize("budget", [None, 20_000])
def test_equals_dense(transform, dtype, budget, backend):
    ops = operands((3, 4), 6, 1009, dtype=dtype, **transform)
    temperature = torch.rand(3, 4, dtype=torch.float64) + 0.5
    options = {"temperature": temperature, "memory_budget": budget, "backend": backend}
    got = gradient_share(ops.hidden, ops.head, ops.labels, **options)
    expected = dense_share(ops.hidden, ops.head, ops.labels, temperature)
    assert got.dtype == dtype
    assert not got.requires_grad
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got.double(), expected.detach(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_sure_token_in_half_precision(dtype):
    # the gradient itself, 1e-9 and less, would be 0 in half precision
    ops = operands((6,), 8, 300, dtype=dtype, bias=False, spread=1.0)
    with torch.no_grad():
        ops.weight[ops.labels] = 6 * ops.hidden / ops.hidden.float().norm(dim=-1, keepdim=True).to(dtype)
        ops.hidden *= 4
    assert F.cross_entropy(dense_logits(ops.hidden, ops.head), ops.labels, reduction="none").min() < 1e-9
    got = gradient_share(ops.hidden, ops.head, ops.labels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), dense_share(ops.hidden, ops.head, ops.labels), rtol=4e-3, atol=0)


def test_ignored_tokens_and_no_gradient_at_all():
    ops = operands((5,), dtype=torch.float32, bias=False)
    alone = gradient_share(ops.hidden, ops.head, ops.labels)
    with torch.no_grad():
        ops.hidden[0] = 1000 * ops.weight[ops.labels[0]]
        ops.weight[ops.labels[0]] *= 4
    labels = ops.labels.clone()
    labels[1] = -100
    got = gradient_share(ops.hidden, ops.head, labels)
    assert got[0].isnan()
    assert got[1] == 0
    assert alone.isfinite().all()
    assert got[2:].isfinite().all()


def test_nothing_of_the_callers_changes():
    ops = operands((7,))
    expected = gradient_share(ops.hidden, ops.head, ops.labels)
    with torch.inference_mode():
        inside = gradient_share(ops.hidden * 1, ops.head, ops.labels)
    torch.testing.assert_close(inside.clone(), expected)
    skipping = replace(ops.head, sparse=SparseBackward(bound=0.5))
    torch.testing.assert_close(gradient_share(ops.hidden, skipping, ops.labels), expected)
    assert all(x.requires_grad and x.grad is None for x in ops.leaves.values())
    with pytest.raises(LabelError):
        gradient_share(ops.hidden, ops.head, ops.labels + 100)


def test_all_may_be_of_inference_mode():
    ops = operands((7,), ranks=(2,))
    expected = gradient_share(ops.hidden, ops.head, ops.labels, temperature=torch.ones(7))
    with torch.inference_mode():
        copy = replace(ops.to(torch.float64), labels=ops.labels.clone())
        got = gradient_share(copy.hidden, copy.head, copy.labels, temperature=torch.ones(7))
    assert torch.equal(got.clone(), expected)


def test_an_ignored_label_wraps_around_in_no_narrow_dtype():
    ops = operands((3,), v=256)
    ops.labels[0] = 156  # -100 in eight bits
    got = gradient_share(ops.hidden, ops.head, ops.labels.to(torch.uint8))
    assert torch.equal(got, gradient_share(ops.hidden, ops.head, ops.labels))
    assert got[0] > 0


def test_a_quantised_head_has_a_share():
    ops = stored_blocks("Q8_0", 331)
    expected = dense_share(ops.hidden, ops.head, ops.labels)
    torch.testing.assert_close(gradient_share(ops.hidden, ops.head, ops.labels).double(), expected, rtol=5e-5, atol=0)


def test_two_products_and_nothing_as_large_as_the_logits():
    n, h, v = 256, 16, 8192
    ops = operands((n,), h, v, dtype=torch.float32, bias=False)
    found = measure(
        lambda: gradient_share(ops.hidden, ops.head, ops.labels, memory_budget=1 << 18, backend="eager"), memory=True
    )
    assert found.flops == pytest.approx(2 * 2 * n * h * v, rel=0.02)
    assert found.peak < n * v  # a quarter of the logits' bytes
