"""Where operands and slices lie, and how the work is cut: other launch sizes, far rows, many parts, many tokens."""

import unittest
from contextlib import nullcontext
from dataclasses import replace

import numpy
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.vocab.backends.logits import add_product, product
from logitless.vocab.reference import dense_token_stats
from tests.support.plain import over, slow
from tests.support.vocab.comparing import ALONE, EVERYTHING, Operands, operands
from tests.support.vocab.triton_calls import (
    blocks_of_rows,
    check,
    no_kernel_for_slices,
    one_kernel,
    sizes,
    slice_names,
    slices_in,
)


def same_gradients(loss: torch.Tensor, wanted: torch.Tensor, ops: Operands, rtol: float = 1e-4) -> None:
    mine, theirs = (torch.autograd.grad(x, list(ops.leaves.values())) for x in (loss, wanted))
    for m, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(m, t, rtol=rtol, atol=1e-6)


@over(
    "head",
    {
        "plain": {},
        "no bias, padded rows": {"bias": False, "vocab_size": 290},
        "softcap, scale": {"softcap": 3.0, "scale": 0.7},
    },
)
def test_products_and_accumulation_in_one_kernel(head, device):
    ops = operands((21,), 37, 301, dtype=torch.float32, **head)
    ops.labels[3] = -100
    values_of_one_kernel(ops.on(device), tuple(name for name in ALONE if name != "max_logit"))


def test_one_kernel_without_labels(device):
    ops = operands((21,), 37, 301, dtype=torch.float32)
    values_of_one_kernel(replace(ops, labels=None).on(device), ("logsumexp",))


def values_of_one_kernel(ops: Operands, want: tuple[str, ...]) -> None:
    true = ops.to(torch.float64)
    exact = dense_token_stats(true.hidden, true.head, ops.labels, want=want, temperature=0.8)
    with one_kernel(ops.hidden.device.type), no_kernel_for_slices(), torch.no_grad():
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, temperature=0.8, backend="triton")
    for name in want:
        got, true = getattr(stats, name).double(), exact[name].double()
        torch.testing.assert_close(got, true, rtol=2e-5, atol=2e-5, msg=name)


def apart(how: str, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight (101, 8) and a bias of which one does not lie together."""
    weight, columns = torch.randn(101, 8, device=device), torch.randn(101, 3, device=device)
    if how == "a bias in a column":
        return weight, columns[:, 1]
    if how == "one bias for all":
        return weight, torch.tensor([0.7], device=device).expand(101)
    if how == "a transposed weight":
        return weight.t().contiguous().t(), None
    return torch.randn(101, 16, device=device)[:, ::2], None


@over("together", {"products apart": False, "one kernel": True})
@over("how", ["a bias in a column", "one bias for all", "a transposed weight", "every other column"])
def test_operands_that_lie_apart(how, together, device):
    hidden, labels = torch.randn(9, 2, 8, device=device)[:, 1], torch.randint(101, (9,), device=device)
    weight, bias = apart(how, device)
    with one_kernel(device) if together else nullcontext(), torch.no_grad():
        stats = ll.token_stats(hidden, ll.LMHead(weight, bias), labels, want=("logprob",), backend="triton")
    dense = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double()).log_softmax(-1)
    true = dense.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(stats.logprob.double(), true, rtol=2e-6, atol=2e-6)


def test_rows_that_begin_past_32_bits(device):
    """Rows lie so far apart that the last is past what 32 bits count: on a CPU in pages that nobody touches."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 20 << 30:
        raise unittest.SkipTest("less than 20 GiB of this GPU's memory is free")
    n, stride = 3, (1 << 30) + 64
    if device == "cpu":
        space = torch.from_numpy(numpy.empty(n * stride, numpy.float32))
    else:
        space = torch.zeros(n * stride, device=device)

    def far(name: str, width: int) -> torch.Tensor:
        return space.as_strided((n, width), (stride, 1), 0 if name.startswith("z0") else 4096)

    with slices_in(far):
        check(device, operands((n,), 7, 301, dtype=torch.float32), ("logprob", "entropy", "rank"), top_k=3)
        ops = operands((n,), 7, 301, dtype=torch.float32, bias=False).on(device)
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton")
        same_gradients(loss, F.cross_entropy(F.linear(ops.hidden, ops.weight), ops.labels), ops)


@slow
def test_many_parts_of_a_row(device):
    """More than one program merges."""
    with sizes(device, accumulate={"rows": 2, "block": 32, "programs": 1000}):
        check(device, operands((2,), 5, 32 * 131, reference=True), EVERYTHING, memory_budget=1 << 20)


def test_products_one_slice_ahead(device):
    ops = operands((13,), 7, 1031, dtype=torch.float32, reference=True)
    with sizes(device, overlap=1), slice_names() as names:
        check(device, ops, ("logprob", "entropy", "kl", "rank"), top_k=3, memory_budget=40_000)
    assert names[:4] == ["a", "b", "a", "b"]


def test_labels_that_repeat_and_rows_of_several_blocks(device):
    ops = operands((17,), 33, 61, dtype=torch.float32, ranks=(9,))
    ops.labels[:] = 7
    ops.labels[[3, 9]] = 8
    with blocks_of_rows(8):
        check(device, ops, ("logprob", "entropy"), candidates=torch.randint(61, (17, 3)))


@slow
def test_a_million_tokens(device):
    """On a CPU as many as make several chunks; each token's own numbers are those of a few alone."""
    n = 1_000_000 if device == "cuda" else 300
    options = {"memory_budget": None if device == "cuda" else 40_000, "backend": "triton"}
    ops = operands((n,), 3, 37, dtype=torch.float32).on(device)
    some = torch.tensor([0, 1, n // 2, n - 2, n - 1], device=device)
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, **options)
    few = ll.token_stats(ops.hidden[some], ops.head, ops.labels[some], backend="triton")
    torch.testing.assert_close(stats.logprob[some], few.logprob)
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, **options)
    same_gradients(loss, F.cross_entropy(F.linear(ops.hidden, ops.weight, ops.bias), ops.labels), ops, rtol=1e-3)


def test_products_into_rows_that_lie_apart(device):
    """In the operands' own dtype on a GPU, with fp32 results; `add_product` adds to what is there."""
    narrow = torch.bfloat16 if device == "cuda" else torch.float32
    h, w = (torch.randn(n, 40, device=device).to(narrow) for n in (24, 72))
    out = torch.zeros(24, 96, device=device)[:, :72]
    product(h, w.t(), out)
    exact = h.double() @ w.double().t()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
    add_product(h, w.t(), out)
    torch.testing.assert_close(out.double(), 2 * exact, rtol=1e-5, atol=1e-4)
    total = torch.ones(90, 40, device=device)
    dz = out.to(narrow)
    add_product(dz.t(), h, total[9:81])
    torch.testing.assert_close(total[9:81].double(), 1 + dz.double().t() @ h.double(), rtol=1e-4, atol=1e-3)
    assert bool((total[81:] == 1).all())
