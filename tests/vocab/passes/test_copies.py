"""A head that multiplies in another dtype than its own: its copy is made once a pass, and gives the same bits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless.algebra.costs import Slices
from logitless.vocab.backends import base
from logitless.vocab.head.quantised import QuantisedWeight
from logitless.vocab.head.sparse import SparseBackward
from tests.support.vocab.comparing import Operands, operands

V, H = 301, 16
COPY = V * H * 4
BUDGET = 4 * COPY


class Conversions(TorchDispatchMode):
    """The numbers of each conversion of so many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_to_copy" and out.dim() == 2 and args[0].dtype == torch.bfloat16:
            self.sizes.append(out.numel())
        return out


@pytest.fixture
def on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(base, "COPIES", ("cpu",))


def mixed() -> Operands:
    """A bf16 head and fp32 hidden states, whose products are in fp32."""
    ops = operands((40,), H, V, dtype=torch.float32, bias=False)
    ops.weight = ops.weight.detach().bfloat16().requires_grad_()
    return ops


def found(ops: Operands, backend: str, budget: int | None) -> list[torch.Tensor]:
    """Statistics and gradients of several chunks."""
    options = {"memory_budget": budget, "backend": backend}
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), **options)
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, **options)
    total = loss + stats.logprob.sum() + stats.entropy.sum()
    return [stats.logprob, stats.entropy, *torch.autograd.grad(total, (ops.hidden, ops.weight))]


def test_the_numbers_are_the_same(backend, on_a_cpu_too, monkeypatch):
    ops = mixed()
    copied = found(ops, backend, BUDGET)
    monkeypatch.setattr(base, "COPIES", ())
    for mine, theirs in zip(copied, found(ops, backend, BUDGET), strict=True):
        place = torch.finfo(mine.dtype).eps  # slices of other widths may round a sum to the next number of its dtype
        torch.testing.assert_close(mine, theirs, rtol=max(1e-5, place), atol=1e-6)


def test_a_copy_is_made_once_where_it_fits(on_a_cpu_too):
    ops = mixed()
    for budget, whole in ((BUDGET, 1), (COPY, 0)):
        with torch.no_grad(), Conversions() as seen:
            ll.token_stats(ops.hidden, ops.head, ops.labels, memory_budget=budget, backend="eager")
        assert seen.sizes.count(V * H) == whole
        said = ll.explain(ops.hidden.detach(), ops.head, ops.labels, memory_budget=budget, backend="eager")
        assert said.copied_bytes == whole * COPY
        assert said.buffer_bytes <= max(budget, COPY)


def test_where_no_copy_stays_slices_are_as_without_any(on_a_cpu_too, monkeypatch):
    """One of a head has no room, and there is none of a quantised one."""
    ops, blocks = mixed(), torch.zeros(V, 34, dtype=torch.uint8)
    quantised = ll.LMHead(QuantisedWeight.gguf(blocks, "Q8_0", dtype=torch.bfloat16))
    calls = (ops.hidden.detach(), ops.head, COPY), (torch.randn(40, 32), quantised, 4 * BUDGET)

    def slices() -> list[Slices]:
        options = [{"memory_budget": budget, "backend": "eager"} for *_, budget in calls]
        return [ll.explain(*call[:2], ops.labels, **how).slices for call, how in zip(calls, options, strict=True)]

    said = slices()
    monkeypatch.setattr(base, "COPIES", ())
    assert said == slices()


def test_a_sparse_backward_keeps_it(on_a_cpu_too, monkeypatch):
    ops = mixed()

    head = ll.LMHead(ops.weight, sparse=SparseBackward(0.3, width=64))

    def gradients() -> list[torch.Tensor]:
        loss = ll.linear_cross_entropy(ops.hidden, head, ops.labels, memory_budget=BUDGET, backend="eager")
        assert head.sparse.skipped_share > 0.25
        return list(torch.autograd.grad(loss, (ops.hidden, ops.weight)))

    with Conversions() as seen:
        copied = gradients()
    assert seen.sizes.count(V * H) == 1
    said = ll.explain(ops.hidden, head, ops.labels, loss=True, memory_budget=BUDGET, backend="eager")
    assert said.copied_bytes == COPY
    monkeypatch.setattr(base, "COPIES", ())
    for mine, theirs in zip(copied, gradients(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=max(1e-5, torch.finfo(mine.dtype).eps), atol=1e-6)
