"""No (N, V), no (N, k, H): what lives at once is the budget, blocks of gathered rows, and the gradients."""

import pytest
import torch

from logitless import LMHead, relax
from logitless.vocab import noise as keyed
from logitless.vocab.backends import rows
from tests.support.allocations import trace_allocations
from tests.support.relax.comparing import some_noise
from tests.support.vocab.comparing import operands

N, H, V, K = 128, 32, 4096, 128
WHOLE = 4 * N * V  # bytes of the logits: 2 MiB
GATHERED = 4 * N * K * H  # bytes of (N, k, H): 2 MiB
BUDGET, BLOCK, IDS = 2**20, 2**14, 2**11


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight")], ids=str)
@pytest.mark.parametrize("k", [K, 0])
def test_a_step(k, trainable, dtype, monkeypatch):
    if k:
        monkeypatch.setitem(keyed.BLOCK, "cpu", IDS)
    ops = operands((N,), H, V, dtype=dtype).training(*trainable)
    table, noise = torch.randn(V, H, requires_grad="weight" in trainable), some_noise((N,))
    leaves = [*ops.leaves.values(), *[table] * table.requires_grad]

    def step():
        soft = relax.gumbel_topk(
            *(ops.hidden, ops.head, 1.0), k=k, noise=noise, embeddings=(table,), memory_budget=BUDGET
        )
        return torch.autograd.grad(soft.embedded[0].sum(), leaves)

    traced = trace_allocations(step)
    gradients = sum(4 * x.numel() + x.numel() * x.itemsize * (x.itemsize < 4) for x in leaves)
    per_token = 4 * N * (10 * H + 4 * k)
    blocks = 3 * 4 * BLOCK + 2 * keyed.SCRATCH * IDS if k else 0  # rows gathered, converted, weighted; noise
    assert traced.peak <= BUDGET + gradients + per_token + blocks < WHOLE + gradients
    assert traced.largest <= max(4 * V * H, BUDGET // 4) < min(WHOLE, GATHERED)


@pytest.mark.parametrize(("k", "kept"), [(16, 12 * 16 + 2 * H), (0, 3 * H)])
def test_what_waits_for_backward(k, kept):
    """The graph of T steps holds O(T·k): ids, and a few numbers per id; O(T·H) of the whole vocabulary."""
    ops = operands((N,), H, V, dtype=torch.float32).training("hidden")
    table = torch.randn(V, H)
    traced = trace_allocations(lambda: relax.gumbel_topk(ops.hidden, ops.head, 1.0, k=k, embeddings=(table,)))
    assert traced.kept <= 4 * N * (kept + 16)


@pytest.mark.parametrize("call", ["gumbel_topk", "expected_embedding"])
def test_hidden_states_that_are_a_view_are_copied_once_at_a_time(call):
    """A call's own checks make such a copy, too, which is gone before the pass begins."""
    h, budget = 512, 2**18
    hidden, weight = torch.randn(4, 257, h)[:, :-1], torch.randn(200, h)
    takes = {"gumbel_topk": {"tau": 1.0, "k": 4}, "expected_embedding": {}}[call]
    traced = trace_allocations(lambda: getattr(relax, call)(hidden, LMHead(weight), memory_budget=budget, **takes))
    copy = 4 * hidden.numel()
    assert traced.peak < {"gumbel_topk": 2 * copy, "expected_embedding": 3 * copy + budget}[call]
