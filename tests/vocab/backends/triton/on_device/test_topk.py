"""The best entries: more than a kernel holds, ties by id, of whole rows."""

import torch

import logitless as ll
from tests.support.plain import over
from tests.support.vocab.comparing import Operands, operands
from tests.support.vocab.triton_calls import check, whole_rows


def test_more_than_a_kernel_holds(device):
    ops = operands((5,), 7, 1031, dtype=torch.float32)
    check(device, ops, ("logprob",), top_k=100, memory_budget=30_000)


@over("k", [6, 70])
def test_ties_go_to_the_lowest_ids(k, device):
    weight = torch.zeros(301, 1)
    weight[[7, 40, 41, 300]] = 1.0
    ops = Operands(torch.ones(3, 1), weight, None, None).on(device)
    options = {"top_k": k, "memory_budget": 2_000, "backend": "triton"}
    stats = ll.token_stats(ops.hidden, ops.head, None, want=("max_logit",), **options)
    assert stats.top_k_ids[1].tolist()[:6] == [7, 40, 41, 300, 0, 1]


@over("k", [2, 6, 64])
def test_ties_in_whole_rows(k, device):
    weight = torch.zeros(331, 1)
    weight[[7, 40, 41, 300]] = 1.0
    weight[330] = 2.0
    ops = Operands(torch.tensor([[1.0], [-1.0], [0.0]]), weight, None, None).on(device)
    ((_, found, _),) = whole_rows(ops, top_k=k)
    values, ids = (ops.hidden @ ops.weight.t()).sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.top_ids, ids[:, :k])
    assert torch.equal(found.top_logits, values[:, :k])
