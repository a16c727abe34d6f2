"""The edges of the domain: impossible entries, large logits, NaN, peaked rows, a policy next to its reference."""

from dataclasses import replace

import torch

import logitless as ll
from logitless.errors import NotFiniteError
from logitless.vocab.reference import dense_token_stats
from tests.support.plain import over, refusal
from tests.support.vocab.comparing import ALONE, EVERYTHING, Operands, operands
from tests.support.vocab.triton_calls import check, drawn


@over("budget", [None, 30_000])
def test_impossible_entries(budget, device):
    ops = operands((6,), 5, 700, reference=True)
    with torch.no_grad():
        ops.bias[[1, 2, 300]] = -torch.inf
        ops.ref.bias[[2, 3]] = -torch.inf
        ops.bias[3] = -torch.inf
    ops.labels[:] = 5
    check(device, ops, ("logprob", "entropy", "kl", "max_logit", "rank"), top_k=3, memory_budget=budget)


def test_impossible_entries_have_no_part_in_a_steep_gradient(device):
    """Their logarithms times an upstream gradient are beyond fp32, and their probabilities 0."""
    ops = operands((6,), 5, 700, dtype=torch.float32)
    with torch.no_grad():
        ops.bias[[1, 2, 300]] = -torch.inf
    ops.labels[:] = 5
    ops = ops.on(device)
    true = ops.to(torch.float64)
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("entropy",), backend="triton")
    exact = dense_token_stats(true.hidden, true.head, true.labels, want=("entropy",))
    found = torch.autograd.grad(100 * stats.entropy.sum(), list(ops.leaves.values()))
    right = torch.autograd.grad(100 * exact["entropy"].sum(), list(true.leaves.values()))
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-3)


def test_very_large_logits(device):
    check(device, operands((9,), 7, 503, spread=300.0, reference=True), EVERYTHING, memory_budget=50_000)


def test_large_logits_in_fp32(device):
    ops = operands((9,), 7, 503, spread=60.0, dtype=torch.float32)
    check(device, ops, ALONE, memory_budget=30_000, tolerance=1e-4)


def diverged(device: str) -> Operands:
    """Three tokens, the middle one of which is NaN."""
    ops = operands((3,), 7, 301, dtype=torch.float32, bias=False, reference=True)
    with torch.no_grad():
        ops.hidden[1] = torch.nan
    return ops.on(device)


@over("budget", [None, 2_000])
def test_a_model_that_has_diverged_is_seen_in_its_rows(budget, device):
    ops, want = diverged(device), ("logprob", "logsumexp", "entropy", "sum_sq_prob", "kl", "mean_logit")
    options = {"reference": ops.reference, "memory_budget": budget, "backend": "triton"}
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, **options)
    for name in want:
        assert getattr(stats, name).isnan().tolist() == [False, True, False], name


def test_a_model_that_has_diverged_is_seen_in_its_gradients(device):
    ops = diverged(device)
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton")
    assert torch.autograd.grad(loss, ops.hidden)[0].isnan().any(1).tolist() == [False, True, False]


def test_nothing_is_drawn_from_a_model_that_has_diverged(device):
    assert refusal(NotFiniteError, lambda: drawn(diverged(device)))


@over("budget", {"whole rows": None, "slices": 4_000})
def test_equal_entries_each_count(budget, device):
    """In one block, in a later one and in another slice; the kernel for plain heads has none of the last sum."""
    ops = Operands(torch.ones(2, 1), torch.full((777, 1), 3.0), None, torch.tensor([0, 776]))
    check(device, ops, ("logprob", "entropy", "sum_sq_prob"), memory_budget=budget)
    ops = Operands(torch.ones(2, 1), torch.full((777, 1), 3.0), torch.zeros(777), torch.tensor([0, 776]))
    ops.bias[500:] = 1.0  # a new maximum, of several entries at once
    check(device, ops, ("logprob", "entropy", "rank"), memory_budget=budget)


@over("margin", [5.0, 17.0, 40.0])
def test_logprobs_of_a_peaked_row(margin, device):
    weight = torch.zeros(1031, 1)
    weight[700] = margin + 7.0
    ops = Operands(torch.ones(2, 1), weight, None, torch.tensor([700, 3])).training("hidden", "weight").on(device)
    want = ("logprob", "entropy")
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, memory_budget=30_000, backend="triton")
    exact = -torch.log1p(1030 * torch.exp(torch.tensor(-margin - 7.0, dtype=torch.float64)))
    torch.testing.assert_close(stats.logprob[0].detach().cpu().double(), exact, rtol=2e-6, atol=0)


def test_kl_of_a_policy_next_to_its_reference(device):
    ops = operands((13,), 7, 1031, dtype=torch.float32, bias=False)
    near = replace(ops, hidden=ops.hidden.detach() + 1e-3 * torch.randn_like(ops.hidden))
    ops = replace(ops, ref=near).on(device)
    true = ops.to(torch.float64)
    exact = dense_token_stats(true.hidden, true.head, None, want=("kl",), reference=true.reference)["kl"]
    options = {"reference": ops.reference, "memory_budget": 30_000, "backend": "triton"}
    kl = ll.token_stats(ops.hidden, ops.head, want=("kl",), **options).kl
    torch.testing.assert_close(kl.double(), exact, rtol=2e-3, atol=0)
    assert (kl > 0).all()
