"""The kernel for plain heads: no bias, no softcap, no reference, and of the sums the maximum's, Σw and entropy's."""

from contextlib import nullcontext
from dataclasses import replace

import torch

import logitless as ll
from logitless.vocab.reference import dense_token_stats
from tests.support.plain import over
from tests.support.vocab.comparing import Operands, operands
from tests.support.vocab.triton_calls import check, half_products, plain_kernel_alone, sizes

WANT = ("logprob", "logsumexp", "entropy", "mean_logit")


def plain(n: int, h: int, v: int, **transform: float) -> Operands:
    return operands((n,), h, v, dtype=torch.float32, bias=False, **transform)


@over("budget", {"whole rows": None, "slices": 4_000})
@over("vocab", [1, 2, 63, 256, 301, 1031])
def test_the_numbers_of_any_width(vocab, budget, device):
    ops = plain(9, 7, vocab)
    with plain_kernel_alone():
        check(device, ops, WANT, memory_budget=budget)


@over("how", {"scale": {"scale": 0.3}, "turned over": {"scale": -1.7}, "padded rows": {"vocab_size": 290}})
def test_a_heads_own_factor(how, device):
    with plain_kernel_alone():
        check(device, plain(5, 7, 301, **how), WANT, temperature=0.6)


@over("temperature", [0.5, 3.0])
def test_a_factor_that_comes_late(temperature, device):
    """Of operands whose products come in fp32 it is the kernel's."""
    ops = operands((9,), 16, 301, dtype=torch.bfloat16, bias=False)
    ops = replace(ops, labels=ops.labels.clone()).on(device)
    true = ops.to(torch.float64)
    exact = dense_token_stats(true.hidden, true.head, ops.labels, want=WANT[:3], temperature=temperature)
    with half_products(device), plain_kernel_alone(), torch.no_grad():
        options = {"want": WANT[:3], "temperature": temperature, "memory_budget": 3_000, "backend": "triton"}
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, **options)
    for name in WANT[:3]:
        torch.testing.assert_close(getattr(stats, name).double(), exact[name], rtol=1e-5, atol=1e-5, msg=name)


def test_parts_of_a_row_and_no_labels(device):
    ops = replace(plain(2, 5, 131 * 32), labels=None)
    with sizes(device, plain={"rows": 2, "block": 32, "programs": 1000}), plain_kernel_alone():
        check(device, ops, ("logsumexp", "entropy"), memory_budget=1 << 20)


@over("label", [0, 63, 64, 255, 256, 300])
def test_a_label_at_the_edge_of_a_block(label, device):
    ops = plain(6, 7, 301)
    ops.labels[:] = label
    ops.labels[1] = 7
    with plain_kernel_alone():
        check(device, ops, ("logprob", "entropy"))


@over("place", {"in a block": 100, "in the rest": 1029})
@over("margin", [5.0, 17.0, 30.0])
def test_digits_beside_an_entry_that_has_all_the_mass(margin, place, device):
    """It is not the label: what is left over is kept apart from its 1."""
    weight = torch.zeros(1031, 1)
    weight[place] = margin + 7.0
    ops = Operands(torch.ones(1, 1), weight, None, torch.tensor([3])).on(device)
    true = ops.to(torch.float64)
    with plain_kernel_alone(), torch.no_grad():
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), backend="triton")
    exact = dense_token_stats(true.hidden, true.head, ops.labels, want=("entropy",))["entropy"]
    torch.testing.assert_close(stats.entropy.double(), exact, rtol=1e-5, atol=0)


def test_equal_entries_each_count(device):
    ops = Operands(torch.ones(2, 1), torch.full((777, 1), 3.0), None, torch.tensor([0, 776])).on(device)
    with plain_kernel_alone(), torch.no_grad():
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), backend="triton")
    uniform = torch.full((2,), 777.0, dtype=torch.float64, device=ops.hidden.device).log()
    torch.testing.assert_close(stats.logprob.double(), -uniform)
    torch.testing.assert_close(stats.entropy.double(), uniform)


@over("entry", {"in a block": 5, "in the rest": 300})
def test_one_number_that_is_not_one_is_seen(entry, device):
    ops = plain(3, 1, 301).on(device)
    with torch.no_grad():
        ops.weight[entry] = torch.nan
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), backend="triton")
    assert stats.logprob.isnan().all()
    assert stats.entropy.isnan().all()


@over("loss", {"of all rows at once": None, "chunk by chunk": 6_000})
def test_the_gradient_from_it(loss, device):
    ops = plain(9, 7, 301).on(device)
    true = ops.to(torch.float64)
    with plain_kernel_alone() if loss else nullcontext():
        found = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, memory_budget=loss, backend="triton")
    exact = torch.nn.functional.cross_entropy(true.hidden @ true.weight.t(), true.labels)
    mine = torch.autograd.grad(found, (ops.hidden, ops.weight))
    theirs = torch.autograd.grad(exact, (true.hidden, true.weight))
    for m, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(m.double(), t, rtol=1e-4, atol=1e-7)
