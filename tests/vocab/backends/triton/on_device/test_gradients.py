"""Gradients: with the head frozen, of half precision operands, of repeated runs."""

import torch
import torch.nn.functional as F

import logitless as ll
from logitless.vocab.reference import dense_token_stats
from tests.support.plain import over
from tests.support.vocab.comparing import PAIRED, operands
from tests.support.vocab.triton_calls import check, half_products

BF16_GRADIENT = 1.5e-2  # of the largest entry: dz is rounded to bf16 before the products
FROZEN = {
    "log-prob": ("logprob", "logsumexp", "self_certainty"),
    "entropy": ("logprob", "entropy"),
    "KL": ("kl",),
    "sum of squares": ("sum_sq_prob",),
    "reverse KL": ("reverse_kl",),
}


@over("want", FROZEN)
def test_a_frozen_head(want, device):
    ops = operands((13,), 7, 1031, reference=bool(set(want) & set(PAIRED)), ranks=(2,))
    check(device, ops.training("hidden", "a"), want, memory_budget=30_000, temperature=0.9)


def test_a_frozen_head_with_a_softcap(device):
    ops = operands((13,), 7, 1031, dtype=torch.float32, softcap=4.0, ranks=(2,))
    check(device, ops.training("hidden", "a"), ("logprob", "entropy"), memory_budget=30_000, temperature=0.9)


@over(
    "dtype_k_want",
    {
        "fp64": (torch.float64, 3, ("logprob", "entropy")),
        "fp32": (torch.float32, 3, ("logprob",)),
        "fp32, wide": (torch.float32, 70, ("logprob", "entropy")),
    },
)
def test_a_frozen_head_with_best_entries(dtype_k_want, device):
    """Some of the best entries are read from the slice after it is accumulated, where weights may not lie yet."""
    dtype, k, want = dtype_k_want
    ops = operands((6,), 7, 517, dtype=dtype).training("hidden")
    check(device, ops, want, top_k=k, candidates=torch.randint(517, (6, 2)), memory_budget=30_000)


@over("want", {"log-prob": ("logprob",), "entropy too": ("logprob", "entropy")})
@over("trained", {"all": ("hidden", "weight", "bias", "a", "b"), "frozen head": ("hidden", "a")})
def test_bf16_operands_have_dz_over_the_products(trained, want, device):
    ops = operands((40,), 24, 1031, dtype=torch.bfloat16, ranks=(2,), spread=2.0).training(*trained).on(device)
    exact = ops.to(torch.float64)
    wanted = dense_token_stats(exact.hidden, exact.head, ops.labels, want=want)
    up = [torch.randn(40, device=device) for _ in want]
    true = torch.autograd.grad([wanted[x] for x in want], list(exact.leaves.values()), [x.double() for x in up])
    with half_products(device):
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, memory_budget=100_000, backend="triton")
        mine = torch.autograd.grad([getattr(stats, x) for x in want], list(ops.leaves.values()), up)
    for name in want:
        torch.testing.assert_close(getattr(stats, name).double(), wanted[name], rtol=2e-5, atol=2e-5)
    for name, m, t in zip(ops.leaves, mine, true, strict=True):
        worst = float((m.double() - t).abs().max() / t.abs().max())
        assert worst < BF16_GRADIENT, f"d {name}: off by {worst:.1e} of the largest"


@over("by", ["triton", "eager"])
def test_fp16_operands_have_room_for_the_dz_of_a_mean(by, device):
    """p over 4,096 tokens is below what fp16 can hold for nearly every entry of a vocabulary of usual size."""
    vocab, count, scale = 50_257, 4096.0, 1024.0
    hidden = torch.randn(8, 16, device=device).half().requires_grad_()
    weight = (torch.randn(vocab, 16, device=device) / 2).half().requires_grad_()
    labels, others = torch.arange(8, device=device), slice(8, None)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    dense = F.cross_entropy(F.linear(*exact), labels, reduction="sum") / count
    true = torch.autograd.grad(dense * scale, exact)
    options = {"denominator": torch.tensor(count, device=device), "backend": by}
    with half_products(device):
        loss = ll.linear_cross_entropy(hidden, ll.LMHead(weight), labels, **options)
        found = torch.autograd.grad(loss * scale, (hidden, weight))
    for got, want in ((found[0], true[0]), (found[1][others], true[1][others])):
        assert float((got.double() - want).norm() / want.norm()) < 2e-3


@over("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_bf16_head_has_its_own_dtype(dtype, device):
    """`weight.grad_dtype` says in which dtype its gradient comes; the sum over chunks is fp32 anyway."""
    ops = operands((40,), 16, 301, dtype=torch.bfloat16, bias=False).on(device)
    exact = ops.to(torch.float64)
    F.cross_entropy(F.linear(exact.hidden, exact.weight), exact.labels, reduction="sum").backward()
    true = 3 * exact.weight.grad
    ops.weight.grad_dtype = dtype
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, reduction="sum", backend="triton")
    (3 * loss).backward()
    assert ops.weight.grad.dtype == dtype
    worst = float((ops.weight.grad.double() - true).abs().max() / true.abs().max())
    assert worst < (1e-5 if dtype == torch.float32 and device == "cpu" else BF16_GRADIENT)


def test_an_upstream_gradient_is_not_rounded_to_bf16(device):
    ops = operands((31,), 64, 203, dtype=torch.bfloat16).on(device)

    def gradient(share: float) -> torch.Tensor:
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton")
        return torch.autograd.grad(loss * share, ops.hidden)[0].double()

    whole, third = gradient(1.0), gradient(1 / 3)
    bias = (third * whole).sum() / whole.square().sum() * 3 - 1
    assert bias < 2.0**-11  # 1/3 in bf16 is 2^-9 too much, in every element alike
    assert bias > (-(2.0**-11) if device == "cuda" else -(2.0**-8))  # the interpreter cuts bf16 off, a GPU rounds


def test_the_same_bits_every_time(device):
    ops = operands((33,), 9, 2050, dtype=torch.float32).on(device)

    def run() -> list[torch.Tensor]:
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, memory_budget=1 << 17, backend="triton")
        return [loss, *torch.autograd.grad(loss, list(ops.leaves.values()))]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
