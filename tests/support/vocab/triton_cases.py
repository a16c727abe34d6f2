"""What the Triton backend must get right, each case held against the dense float64 oracle, on whatever device.

    python -m tests.support.vocab.triton_cases [--device cuda] [NAME ...]

runs them without pytest: on a GPU as they are, on a CPU with TRITON_INTERPRET=1 under Triton's interpreter. With
`--serve` the names come on standard input, one a line, and each answer is a line of JSON.
"""

import argparse
import copy
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless.algebra.costs import Price
from logitless.algebra.stats import STATISTICS
from logitless.errors import NotFiniteError, OptionError
from logitless.sample.record import SampleRecord, names
from logitless.vocab.backends import logits as tiles
from logitless.vocab.backends.triton import tuned as triton_tuned
from logitless.vocab.call import call as problem
from logitless.vocab.call import validate as checks
from logitless.vocab.call.call import Call
from logitless.vocab.call.validate import flatten
from logitless.vocab.head.low_rank import LowRank
from logitless.vocab.noise import Noise
from logitless.vocab.passes.engine import Pass
from logitless.vocab.reference import dense_token_stats
from tests.support.allocations import poison, trace_allocations
from tests.support.vocab.comparing import (
    ALONE,
    EVERYTHING,
    PAIRED,
    Operands,
    all_at_once,
    compare,
    named_results,
    operands,
)

DEVICE = "cpu"
BUDGETS = (None, 40_000, 200_000)  # bytes: whole rows, slices of some and of all tokens that do not divide V
BF16_GRADIENT = 1.5e-2  # of the largest entry: dz is rounded to bf16 before the products
CASES: dict[str, Callable[[], None]] = {}
SLOW = {  # under the interpreter, and next to others that run the same kernels
    "a million tokens", "drawn: a temperature", "drawn: greedy", "drawn: min-p", "many parts of a row",
    "no waiting with every option",
}  # fmt: skip
Result = TypeVar("Result")


def case(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Puts a function into CASES."""

    def put(function: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = function
        return function

    return put


def moved(ops: Operands) -> Operands:
    """The operands as leaves on the device."""
    if DEVICE == "cpu":
        return ops

    def to(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.detach().to(DEVICE).requires_grad_(x.requires_grad)

    adapters = tuple(LowRank(to(x.a), to(x.b), x.scaling, x.dropout) for x in ops.adapters)
    labels = None if ops.labels is None else ops.labels.to(DEVICE)
    ref = None if ops.ref is None else moved(ops.ref)
    named = {name: to(getattr(ops, name)) for name in ("hidden", "weight", "bias")}
    return replace(ops, **named, labels=labels, ref=ref, adapters=adapters)


def check(ops: Operands, want: tuple[str, ...] = ("logprob",), **options: object) -> None:
    """`compare` on the device with this backend."""
    candidates = options.get("candidates")
    if candidates is not None:
        options["candidates"] = candidates.to(DEVICE)
    compare(moved(ops), want, backend="triton", **options)


def _add_statistics() -> None:
    def statistic(name: str, dtype: torch.dtype, budget: int | None) -> Callable[[], None]:
        def run() -> None:
            ops = operands((13,), 7, 1031, dtype=dtype, reference=name in PAIRED)
            check(ops, (name,), memory_budget=budget)

        return run

    for name in EVERYTHING:
        CASES[f"{name}, fp64"] = statistic(name, torch.float64, 100_000)
        CASES[f"{name}, fp32"] = statistic(name, torch.float32, 200_000)


_add_statistics()


def _add_all_at_once() -> None:
    def every(budget: int | None, dtype: torch.dtype) -> Callable[[], None]:
        def run() -> None:
            ops, options = all_at_once(dtype, budget)
            check(ops, EVERYTHING, **options)

        return run

    for budget in BUDGETS:
        CASES[f"all at once, budget {budget}"] = every(budget, torch.float32)
    CASES["all at once, fp64"] = every(100_000, torch.float64)


_add_all_at_once()


def _add_transforms() -> None:
    def transform(options: dict, want: tuple[str, ...], **more: object) -> Callable[[], None]:
        return lambda: check(operands((6,), 7, 1031, reference=True, **options), want, top_k=4, temperature=1.6, **more)

    for options in (
        {"scale": 0.3},
        {"softcap": 4.0},
        {"scale": 0.6, "softcap": 3.0, "vocab_size": 1030},
        {"bias": False, "vocab_size": 997},
    ):
        CASES[f"head {options}"] = transform(options, EVERYTHING, memory_budget=70_000)
    CASES["head kept with a softcap"] = transform({"softcap": 4.0, "scale": 1.7}, EVERYTHING)


_add_transforms()

FROZEN = {
    "log-prob": ("logprob", "logsumexp", "self_certainty"),
    "entropy": ("logprob", "entropy"),
    "KL": ("kl",),
    "Σp²": ("sum_sq_prob",),
    "reverse KL": ("reverse_kl",),
}


def _add_frozen_heads() -> None:
    def frozen(want: tuple[str, ...], softcap: float | None, dtype: torch.dtype) -> Callable[[], None]:
        def run() -> None:
            reference = bool(set(want) & set(PAIRED))
            ops = operands((13,), 7, 1031, dtype=dtype, reference=reference, softcap=softcap, ranks=(2,))
            check(ops.training("hidden", "a"), tuple(w for w in want if w != "self_certainty" or not softcap),
                  memory_budget=30_000, temperature=0.9)  # fmt: skip

        return run

    for name, want in FROZEN.items():
        CASES[f"frozen head, {name}"] = frozen(want, None, torch.float64)
    CASES["frozen head, entropy, softcap"] = frozen(FROZEN["entropy"], 4.0, torch.float32)


_add_frozen_heads()


def on_triton(call: Call) -> Call:
    return replace(call, options=replace(call.options, backend="triton"))


@case("frozen head with best entries")
def frozen_with_best() -> None:
    """Some of the best entries are read from the slice after the fold, where weights may not lie yet."""
    for dtype, k, want in ((torch.float64, 3, ("logprob", "entropy")), (torch.float32, 3, ("logprob",)),
                           (torch.float32, 70, ("logprob", "entropy"))):  # fmt: skip
        ops = operands((6,), 7, 517, dtype=dtype).training("hidden")
        check(ops, want, top_k=k, candidates=torch.randint(517, (6, 2)), memory_budget=30_000)


@case("no labels")
def without_labels() -> None:
    want = tuple(name for name in EVERYTHING if not STATISTICS[name].needs_label)
    for budget in (None, 20_000):
        ops = replace(operands((6,), 7, 517, reference=True), labels=None)
        check(ops, want, top_k=2, memory_budget=budget)


@case("adapters on the head")
def adapters() -> None:
    check(operands((9,), 7, 523, reference=True, ranks=(2, 3)), ("logprob", "entropy", "kl"), memory_budget=30_000)
    check(operands((9,), 7, 523, ranks=(2,), scale=0.5).training("a", "b"), ("logprob", "entropy"), temperature=0.7)


@case("ragged sizes")
def ragged() -> None:
    for n, h, v in ((1, 1, 1), (1, 1, 2), (17, 33, 129), (65, 3, 257), (2, 130, 5)):
        check(operands((n,), h, v, reference=True), EVERYTHING, top_k=min(v, 4))


@case("no token that counts")
def nothing() -> None:
    check(operands((0,)), ALONE, top_k=2)
    ops = operands((4,))
    ops.labels[:] = -100
    check(ops, ALONE, top_k=2)


@case("impossible entries")
def impossible() -> None:
    for budget in (None, 30_000):
        ops = operands((6,), 5, 700, reference=True)
        with torch.no_grad():
            ops.bias[[1, 2, 300]] = -torch.inf
            ops.ref.bias[[2, 3]] = -torch.inf
            ops.bias[3] = -torch.inf
        ops.labels[:] = 5
        check(ops, ("logprob", "entropy", "kl", "max_logit", "rank"), top_k=3, memory_budget=budget)


@case("large logits")
def large() -> None:
    check(operands((9,), 7, 503, spread=300.0, reference=True), EVERYTHING, memory_budget=50_000)
    check(operands((9,), 7, 503, spread=60.0, dtype=torch.float32), ALONE, memory_budget=30_000, tolerance=1e-4)


@case("a model that has diverged is seen")
def diverged() -> None:
    ops = moved(operands((3,), 7, 301, dtype=torch.float32, bias=False, reference=True))
    with torch.no_grad():
        ops.hidden[1] = torch.nan
    want = ("logprob", "logsumexp", "entropy", "sum_sq_prob", "kl", "mean_logit")
    for budget in (None, 2_000):
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, backend="triton",
                               memory_budget=budget)  # fmt: skip
        for name in want:
            assert getattr(stats, name).isnan().tolist() == [False, True, False], name
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton")
    assert torch.autograd.grad(loss, ops.hidden)[0].isnan().any(1).tolist() == [False, True, False]
    refused = None
    try:
        _drawn(ops, {}, "triton")
    except NotFiniteError as reason:
        refused = reason
    assert refused is not None


@case("temperature for each token")
def temperatures() -> None:
    ops = operands((3, 5), reference=True)
    ops.labels[1, 2] = -100
    check(ops, EVERYTHING, temperature=(torch.rand(3, 5) + 0.5).to(DEVICE), top_k=2)


@case("wide top-k and ties")
def best() -> None:
    ops = operands((5,), 7, 1031, dtype=torch.float32)
    check(ops, ("logprob",), top_k=100, memory_budget=30_000)
    weight = torch.zeros(301, 1)
    weight[[7, 40, 41, 300]] = 1.0  # zeros and ones: the lowest ids first
    ops = Operands(torch.ones(3, 1), weight, None, torch.tensor([0, 1, 2]))
    for k in (6, 70):
        stats = ll.token_stats(*(x.to(DEVICE) for x in (ops.hidden,)), moved(ops).head, None, want=("max_logit",),
                               top_k=k, memory_budget=2_000, backend="triton")  # fmt: skip
        assert stats.top_k_ids[1].tolist()[:6] == [7, 40, 41, 300, 0, 1]


@case("log-probs of a peaked row")
def peaked() -> None:
    for margin in (5.0, 17.0, 40.0):
        weight = torch.zeros(1031, 1)
        weight[700] = margin + 7.0
        ops = Operands(torch.ones(2, 1), weight, None, torch.tensor([700, 3])).training("hidden", "weight")
        exact = -torch.log1p(1030 * torch.exp(torch.tensor(-margin - 7.0, dtype=torch.float64)))
        stats = ll.token_stats(*_call(ops), want=("logprob", "entropy"), memory_budget=30_000, backend="triton")
        torch.testing.assert_close(stats.logprob[0].detach().cpu().double(), exact, rtol=2e-6, atol=0)


def _call(ops: Operands) -> tuple:
    there = moved(ops)
    return there.hidden, there.head, there.labels


@case("KL of a policy next to its reference")
def near() -> None:
    ops = operands((13,), 7, 1031, dtype=torch.float32, reference=True, bias=False)
    reference = replace(ops, hidden=ops.hidden.detach() + 1e-3 * torch.randn_like(ops.hidden), ref=None)
    ops = moved(replace(ops, ref=reference))
    true = ops.to(torch.float64)
    exact = dense_token_stats(true.hidden, true.head, None, want=("kl",), reference=true.reference)["kl"]
    kl = ll.token_stats(ops.hidden, ops.head, want=("kl",), reference=ops.reference, memory_budget=30_000,
                        backend="triton").kl  # fmt: skip
    torch.testing.assert_close(kl.double(), exact, rtol=2e-3, atol=0)
    assert (kl > 0).all()


@case("cross-entropy")
def cross_entropy() -> None:
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-2}):
        for budget in (None, 20_000):
            ops = operands((11,), 7, 1031)
            ops.labels[3] = -100
            exact = moved(ops.to(torch.float64))
            z = F.linear(exact.hidden, exact.weight, exact.bias)
            wanted = F.cross_entropy(z, exact.labels, label_smoothing=options.get("label_smoothing", 0.0))
            wanted = wanted + options.get("z_loss", 0.0) * z.logsumexp(-1)[exact.labels != -100].square().mean()
            there = moved(ops)
            loss = ll.linear_cross_entropy(
                there.hidden, there.head, there.labels, memory_budget=budget, backend="triton", **options
            )
            torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
            for mine, theirs in zip(
                torch.autograd.grad(loss, list(there.leaves.values())),
                torch.autograd.grad(wanted, list(exact.leaves.values())),
                strict=True,
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@case("token_loss, twice backward")
def token_loss() -> None:
    ops = moved(operands((11,), 7, 1031, reference=True))

    def loss_fn(stats: ll.TokenStats, advantages: torch.Tensor) -> torch.Tensor:
        return -(stats.logprob.exp() * advantages) - 0.1 * stats.entropy + 0.2 * stats.kl

    advantages = torch.randn(11, dtype=torch.float64, device=DEVICE)
    options = {"want": ("logprob", "entropy", "kl"), "reference": ops.reference}
    exact = dense_token_stats(ops.hidden, ops.head, ops.labels, **options)
    wanted = torch.autograd.grad(loss_fn(ll.TokenStats(exact), advantages).mean(), list(ops.leaves.values()))
    loss = ll.token_loss(loss_fn, ops.hidden, ops.head, ops.labels, inputs=(advantages,), backend="triton",
                         memory_budget=40_000, **options)  # fmt: skip
    for _ in range(2):
        found = torch.autograd.grad(3 * loss, list(ops.leaves.values()), retain_graph=True)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, 3 * theirs, rtol=1e-9, atol=1e-11)


@case("kept rows are logits")
def kept_rows() -> None:
    """What `sample_tokens` draws from."""
    for options in ({"bias": True, "softcap": 6.0}, {"bias": False}):
        ops = moved(operands((7,), 5, 1031, dtype=torch.float32, **options))
        call = flatten(ops.hidden, ops.head, None, want=("logsumexp",), temperature=0.6, top_k=3)
        run = Pass(on_triton(call), Price("values", 1, materialised=True))
        z = F.linear(ops.hidden, ops.weight, ops.bias)
        z = (torch.tanh(z / 6) * 6 if ops.head.softcap else z) / 0.6
        with torch.no_grad():
            for rows, chunk in run.chunks():
                run.fold(chunk, keep="logits")
                kept = torch.cat([tile.z for tile in chunk.kept], 1)
                torch.testing.assert_close(kept, z[rows], rtol=1e-5, atol=1e-5)


@case("bf16 operands: dz over the products")
def half() -> None:
    """On a CPU the products of bf16 operands with fp32 results are emulated, so that the same code runs."""
    with _emulated_products():
        for frozen in (False, True):
            _half(frozen)


def _half(frozen: bool) -> None:
    ops = operands((40,), 24, 1031, dtype=torch.bfloat16, ranks=(2,), spread=2.0)
    ops = moved(ops.training(*(("hidden", "a") if frozen else ("hidden", "weight", "bias", "a", "b"))))
    for want in (("logprob",), ("logprob", "entropy")):
        exact = ops.to(torch.float64)
        wanted = dense_token_stats(exact.hidden, exact.head, ops.labels, want=want)
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, memory_budget=100_000, backend="triton")
        up = {name: torch.randn(40, device=DEVICE) for name in want}
        for name in want:
            torch.testing.assert_close(getattr(stats, name).double(), wanted[name], rtol=2e-5, atol=2e-5)
        mine = torch.autograd.grad([getattr(stats, x) for x in want], list(ops.leaves.values()), list(up.values()))
        true = torch.autograd.grad(
            [wanted[x] for x in want], list(exact.leaves.values()), [x.double() for x in up.values()]
        )
        for name, m, t in zip(ops.leaves, mine, true, strict=True):
            worst = float((m.double() - t).abs().max() / t.abs().max())
            assert worst < BF16_GRADIENT, f"d {name}: off by {worst:.1e} of the largest"


@case("fp16 operands: a mean's dz has room")
def half_of_many() -> None:
    """p over 4,096 tokens is below what fp16 can hold for nearly every entry of a vocabulary of usual size."""
    vocab, count, scale = 50_257, 4096.0, 1024.0
    hidden = torch.randn(8, 16, device=DEVICE).half().requires_grad_()
    weight = (torch.randn(vocab, 16, device=DEVICE) / 2).half().requires_grad_()
    labels, others = torch.arange(8, device=DEVICE), slice(8, None)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    dense = F.cross_entropy(F.linear(*exact), labels, reduction="sum") / count
    true = torch.autograd.grad(dense * scale, exact)
    for backend in ("triton", "eager"):
        with _emulated_products():
            options = {"denominator": torch.tensor(count, device=DEVICE), "backend": backend}
            loss = ll.linear_cross_entropy(hidden, ll.LMHead(weight), labels, **options)
            found = torch.autograd.grad(loss * scale, (hidden, weight))
        for got, want in ((found[0], true[0]), (found[1][others], true[1][others])):
            assert float((got.double() - want).norm() / want.norm()) < 2e-3, backend


def _emulated_products() -> ExitStack:
    stack = ExitStack()
    if DEVICE != "cpu":
        return stack

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(a.float() @ b.float())

    def addmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.add_(a.float() @ b.float())

    from logitless.vocab.backends.eager import backend as eager
    from logitless.vocab.backends.triton import backend
    from logitless.vocab.backends.triton import slices as triton_slices

    stack.enter_context(patch.object(tiles, "has_out_dtype", lambda _: True))
    for module in (tiles, triton_slices, backend, eager):
        stack.enter_context(patch.object(module, "add_product", addmm))
        if module is not eager:
            stack.enter_context(patch.object(module, "product", mm))
    return stack


@case("products and fold in one kernel")
def one_kernel() -> None:
    table = copy.deepcopy(triton_tuned.table_for(torch.device(DEVICE)))
    table["gemm"] |= {"rows": 16, "entries": 32, "inner": 16, "group": 3, "least_tokens": 1, "most_tokens": 100}
    from logitless.vocab.backends.triton import backend

    with patch.object(backend, "table_for", lambda _: table), patch.object(
        backend.folding, "accumulate_slice", None
    ), torch.no_grad():  # fmt: skip
        every = tuple(name for name in ALONE if name != "max_logit")
        for options, want in (
            ({}, every), ({"bias": False, "vocab_size": 290}, every), ({"softcap": 3.0, "scale": 0.7}, every),
            ({}, ("logsumexp",)),
        ):  # fmt: skip
            ops = operands((21,), 37, 301, dtype=torch.float32, **options)
            ops.labels[3] = -100
            if want != every:
                ops = replace(ops, labels=None)
            true = moved(ops.to(torch.float64))
            exact = dense_token_stats(true.hidden, true.head, true.labels, want=want, temperature=0.8)
            stats = ll.token_stats(*_call(ops), want=want, temperature=0.8, backend="triton")
            for name in want:
                got = getattr(stats, name).double()
                torch.testing.assert_close(got, exact[name].double(), rtol=2e-5, atol=2e-5, msg=name)


@case("operands that lie apart")
def apart() -> None:
    """Columns of wider tensors, transposed and repeated ones: with products apart, and in one kernel where they may."""
    from logitless.vocab.backends.triton import backend

    table = copy.deepcopy(triton_tuned.table_for(torch.device(DEVICE)))
    table["gemm"] |= {"rows": 16, "entries": 32, "inner": 16, "group": 3, "least_tokens": 1, "most_tokens": 100}
    x, labels = torch.randn(9, 2, 8, device=DEVICE)[:, 1], torch.randint(101, (9,), device=DEVICE)
    weight, columns = torch.randn(101, 8, device=DEVICE), torch.randn(101, 3, device=DEVICE)
    repeated = torch.tensor([0.7], device=DEVICE).expand(101)
    for together in (False, True):
        with patch.object(backend, "table_for", lambda _: table) if together else nullcontext(), torch.no_grad():
            for w, bias in (
                (weight, columns[:, 1]), (weight, repeated), (weight.t().contiguous().t(), None),
                (torch.randn(101, 16, device=DEVICE)[:, ::2], None),
            ):  # fmt: skip
                stats = ll.token_stats(x, ll.LMHead(w, bias), labels, want=("logprob",), backend="triton")
                dense = F.linear(x.double(), w.double(), None if bias is None else bias.double()).log_softmax(-1)
                true = dense.gather(1, labels[:, None])[:, 0]
                torch.testing.assert_close(stats.logprob.double(), true, rtol=2e-6, atol=2e-6)


@case("gradients of a bf16 head in fp32")
def wide_gradient() -> None:
    """`weight.grad_dtype` says in which dtype its gradient comes; the sum over chunks is fp32 anyway."""
    ops = operands((40,), 16, 301, dtype=torch.bfloat16, bias=False)
    exact = moved(ops.to(torch.float64))
    F.cross_entropy(F.linear(exact.hidden, exact.weight), exact.labels, reduction="sum").backward()
    for dtype in (torch.bfloat16, torch.float32) if hasattr(torch.Tensor, "grad_dtype") else ():
        there = moved(ops.to(torch.bfloat16))
        there.weight.grad_dtype = dtype
        head = there.head
        loss = ll.linear_cross_entropy(there.hidden, head, there.labels, reduction="sum", backend="triton")
        (3 * loss).backward()
        assert there.weight.grad.dtype == dtype
        true = 3 * exact.weight.grad
        worst = float((there.weight.grad.double() - true).abs().max() / true.abs().max())
        assert worst < (1e-5 if dtype == torch.float32 and DEVICE == "cpu" else BF16_GRADIENT)


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a number from the device, or makes a result whose size depends on its numbers."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.REFUSED or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def _step(ops: Operands, budget: int | None) -> list[torch.Tensor]:
    """Everything that a training step asks for, ignored tokens among the others."""
    options = {"memory_budget": budget, "backend": "triton"}
    leaves = list(ops.leaves.values())
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, label_smoothing=0.1, **options)
    own = ll.token_loss(
        lambda s, x: -s.logprob * x - 0.1 * s.entropy + s.kl, ops.hidden, ops.head, ops.labels,
        inputs=(torch.ones_like(ops.labels, dtype=ops.hidden.dtype),), want=("logprob", "entropy", "kl"),
        reference=ops.reference, **options,
    )  # fmt: skip
    want = ("logprob", "entropy", "rank")
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, top_k=3, **options)
    total = loss + own + (stats.logprob * stats.entropy).sum() + stats.top_k_logits.sum()
    return [loss, own, stats.logprob, stats.rank, stats.top_k_ids, *torch.autograd.grad(total, leaves)]


def _waits(step: Callable[[], object]) -> bool:
    try:
        with NoWaiting():
            step()
    except AssertionError as reason:
        return "waits for the device" in str(reason)
    return False


@case("an upstream gradient is not rounded to bf16")
def upstream() -> None:
    ops = moved(operands((31,), 64, 203, dtype=torch.bfloat16))

    def gradient(share: float) -> torch.Tensor:
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton")
        return torch.autograd.grad(loss * share, ops.hidden)[0].double()

    whole, third = gradient(1.0), gradient(1 / 3)
    bias = (third * whole).sum() / whole.square().sum() * 3 - 1
    assert bias < 2.0**-11  # 1/3 in bf16 is 2^-9 too much, in every element alike
    assert bias > (-(2.0**-11) if DEVICE == "cuda" else -(2.0**-8))  # the interpreter cuts bf16 off, a GPU rounds


@case("no waiting for the device in a CUDA graph")
def captured() -> None:
    """On a GPU a graph is captured and replayed; on a CPU what would wait is refused."""
    for budget in (None, 20_000):
        ops = moved(operands((11,), 7, 301, dtype=torch.float32, reference=True))
        ops.labels[[2, 7]] = -100
        plain = _step(ops, budget)
        if DEVICE == "cpu":
            assert _waits(lambda ops=ops, budget=budget: _step(ops, budget))  # labels are looked at outside a graph
            with ExitStack() as stack:
                for module in (problem, checks):
                    stack.enter_context(patch.object(module, "capturing", lambda _: True))
                stack.enter_context(NoWaiting())
                found = _step(ops, budget)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = _step(ops, budget)
            graph.replay()
        for mine, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@case("memory: slices within the budget, no more")
def memory() -> None:
    n, h, v, budget = 24, 8, 4099, 1 << 17
    ops = moved(operands((n,), h, v, dtype=torch.float32, bias=False))

    def run() -> None:
        ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, memory_budget=budget, backend="triton").backward()

    run()
    if DEVICE == "cpu":
        found = trace_allocations(run)
        assert found.largest <= max(budget, 4 * v * h)
        assert found.peak <= budget + 3 * 4 * v * h + 40 * 4 * n
    want = ("logprob", "entropy")
    with torch.no_grad():
        found = trace_allocations(
            lambda: ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, memory_budget=budget, backend="triton")
        )
    assert found.peak <= budget + 80 * 4 * n + 4 * n * h * 3


@case("the same bits every time")
def repeats() -> None:
    ops = moved(operands((33,), 9, 2050, dtype=torch.float32))

    def run() -> list[torch.Tensor]:
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, memory_budget=1 << 17, backend="triton")
        return [loss, *torch.autograd.grad(loss, list(ops.leaves.values()))]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def _add_draws() -> None:
    def drawn(rules: dict, head: dict, spread: float, v: int = 1031) -> Callable[[], None]:
        def run() -> None:
            ops = moved(operands((4,), 9, v, dtype=torch.float32, spread=spread, **head))
            if ops.bias is not None:
                with torch.no_grad():
                    ops.bias[[1, 500]] = -torch.inf
            seeds = torch.randint(2**63 - 1, (4,))
            seeds[0] = -3
            options = {"keep": 5, "noise": Noise(seeds.to(DEVICE), torch.arange(4, device=DEVICE) * 2**31), **rules}
            wanted, got = (_drawn(ops, options, name) for name in ("eager", "triton"))
            for name in names():
                mine, theirs = getattr(got, name), getattr(wanted, name)
                assert mine.dtype == theirs.dtype, name
                torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")

        return run

    warm = torch.tensor([0.0, 1.0, 0.5, 9.0], device=DEVICE)
    for name, rules in {
        "noise alone": {}, "greedy": {"temperature": 0}, "a temperature": {"temperature": 0.7},
        "a temperature for each": {"temperature": warm}, "top-k": {"top_k": 3},
        "top-k, top-p": {"top_k": 40, "top_p": 0.8},
        "top-p": {"top_p": 0.9, "temperature": 0.3}, "min-p": {"min_p": 0.05},
    }.items():  # fmt: skip
        CASES[f"drawn: {name}"] = drawn(rules, {"bias": False}, 3.0)
    CASES["drawn: past the best entries"] = drawn({"top_p": 0.999}, {"bias": False}, 0.2)
    CASES["drawn: a flat row in parts"] = drawn({"temperature": 5.0}, {"bias": False}, 0.01, 5003)
    CASES["drawn: impossible entries, softcap"] = drawn({}, {"softcap": 5.0, "vocab_size": 1030}, 3.0)


def _drawn(ops: Operands, options: dict, backend: str) -> SampleRecord:
    with patch.object(checks, "choose", lambda name, device: backend):
        return ll.sample_tokens(ops.hidden, ops.head, **options)


_add_draws()


@case("the best of whole rows, ties by id")
def best_of_rows() -> None:
    weight = torch.zeros(331, 1)
    weight[[7, 40, 41, 300]] = 1.0
    weight[330] = 2.0
    ops = moved(Operands(torch.tensor([[1.0], [-1.0], [0.0]]), weight, None, None))
    for k in (2, 6, 64):
        call = flatten(ops.hidden, ops.head, None, want=("logsumexp",), top_k=k)
        run = Pass(on_triton(call), Price("values", 1, materialised=True))
        ((_, chunk),) = run.chunks()
        found = run.fold(chunk, keep="logits")
        z = ops.hidden @ ops.weight.t()
        values, ids = z.sort(dim=1, descending=True, stable=True)
        assert torch.equal(found.top_ids, ids[:, :k])
        assert torch.equal(found.top_logits, values[:, :k])


@case("drawing in a CUDA graph")
def drawn_in_a_graph() -> None:
    ops = moved(operands((2,), 7, 301, dtype=torch.float32, bias=False))
    noise = Noise(torch.arange(2, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE))
    warm = torch.tensor([0.0, 0.7], device=DEVICE)
    for rules in ({}, {"temperature": warm}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}):
        plain = _drawn(ops, {"noise": noise, **rules}, "triton")
        found = _captured(lambda rules=rules: _drawn(ops, {"noise": noise, **rules}, "triton"))
        for name in names():
            torch.testing.assert_close(getattr(found, name), getattr(plain, name))
    mixed = replace(ops, weight=ops.weight.detach().bfloat16())
    for some, options, reason in (
        (ops, {"top_p": 0.9}, "in a CUDA graph"),  # a nucleus may reach past the best entries
        (mixed, {"memory_budget": 20_000}, "of one dtype"),  # the head is converted, a slice at a time
    ):
        refused = None
        try:
            _captured(lambda some=some, options=options: _drawn(some, {"noise": noise, **options}, "triton"))
        except OptionError as found:
            refused = str(found)
        assert refused is not None
        assert reason in refused


def _captured(step: Callable[[], Result]) -> Result:
    """The step's result from a replayed graph; on a CPU with what would wait refused."""
    from logitless.sample import tokens, triton_draw

    if DEVICE == "cpu":
        with ExitStack() as stack:
            for module in (problem, checks, tokens, triton_draw):
                stack.enter_context(patch.object(module, "capturing", lambda _: True))
            stack.enter_context(NoWaiting())
            return step()
    step()  # compiles kernels and loads libraries, which no graph may hold
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    return found


@case("no waiting with every option")
def captured_everything() -> None:
    ops, options = all_at_once(torch.float32, 100_000)
    ops, heat = moved(ops), (torch.rand(13) + 0.5).to(DEVICE)
    options |= {"candidates": options["candidates"].to(DEVICE), "temperature": heat, "backend": "triton"}
    trained = (("hidden", "weight", "bias"), EVERYTHING), (("hidden",), ("logprob", "entropy"))
    for leaves, want in trained:
        some = ops.training(*leaves)
        reference = some.reference if set(want) & set(PAIRED) else None

        def step(some: Operands = some, want: tuple[str, ...] = want, reference: object = reference) -> list:
            stats = ll.token_stats(some.hidden, some.head, some.labels, want=want, reference=reference, **options)
            found = [x for name, x in named_results(stats, want, options).items()]
            total = sum((x * x).sum() for x in found if x.is_floating_point())
            return [*found, *torch.autograd.grad(total, list(some.leaves.values()))]

        for mine, theirs in zip(_captured(step), step(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@case("best entries in fp64 without waiting")
def captured_best() -> None:
    ops = moved(operands((3,), 5, 61))

    def step() -> torch.Tensor:
        return ll.token_stats(ops.hidden.detach(), ops.head, None, want=(), top_k=7, backend="triton").top_k_logits

    torch.testing.assert_close(_captured(step), step())


def _same_gradients(loss: torch.Tensor, wanted: torch.Tensor, ops: Operands) -> None:
    each = (torch.autograd.grad(x, list(ops.leaves.values())) for x in (loss, wanted))
    for mine, theirs in zip(*each, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)


@case("rows that begin past 2³¹")
def beyond_32_bits() -> None:
    """Rows lie so far apart that the last is past what 32 bits count: on a CPU in pages that nobody touches."""
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 20 << 30:
        return
    n, stride = 3, (1 << 30) + 64
    space = torch.from_numpy(numpy.empty(n * stride, numpy.float32)).to(DEVICE) if DEVICE == "cpu" else (
        torch.zeros(n * stride, device=DEVICE)
    )  # fmt: skip
    from logitless.vocab.backends.triton import slices as triton_slices

    def far(chunk: object, name: str, width: int) -> torch.Tensor:
        return space.as_strided((n, width), (stride, 1), 0 if name.startswith("z0") else 4096)

    with patch.object(triton_slices, "buffer", far):
        check(operands((n,), 7, 301, dtype=torch.float32), ("logprob", "entropy", "rank"), top_k=3)
        ops = moved(operands((n,), 7, 301, dtype=torch.float32, bias=False))
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton")
        wanted = F.cross_entropy(F.linear(ops.hidden, ops.weight), ops.labels)
        for mine, theirs in zip(
            *(torch.autograd.grad(x, list(ops.leaves.values())) for x in (loss, wanted)), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@case("many parts of a row")
def many_parts() -> None:
    """More than one program merges."""
    table = copy.deepcopy(triton_tuned.table_for(torch.device(DEVICE)))
    table["fold"] |= {"rows": 2, "block": 32, "programs": 1000}
    from logitless.vocab.backends.triton import backend

    with patch.object(backend, "table_for", lambda _: table):
        check(operands((2,), 5, 32 * 131, reference=True), EVERYTHING, memory_budget=1 << 20)


@case("products one slice ahead")
def overlapped() -> None:
    from logitless.vocab.backends.triton import backend
    from logitless.vocab.backends.triton import slices as triton_slices

    names: list[str] = []
    slice_of = triton_slices.slice_of

    def named(chunk: object, v: slice, w: tuple, name: str) -> object:
        names.append(name)
        return slice_of(chunk, v, w, name)

    table = triton_tuned.table_for(torch.device(DEVICE)) | {"overlap": 1}
    ops = operands((13,), 7, 1031, dtype=torch.float32, reference=True)
    with patch.object(backend, "table_for", lambda _: table), patch.object(triton_slices, "slice_of", named):
        check(ops, ("logprob", "entropy", "kl", "rank"), top_k=3, memory_budget=40_000)
    assert names[:4] == ["a", "b", "a", "b"]


@case("labels that repeat, rows of several blocks")
def repeated_labels() -> None:
    from logitless.vocab.backends.triton import rows as triton_rows

    ops = operands((17,), 33, 61, dtype=torch.float32, ranks=(9,))
    ops.labels[:] = 7
    ops.labels[[3, 9]] = 8
    with patch.object(triton_rows, "BLOCK", {"cpu": 8, "cuda": 8}):
        check(ops, ("logprob", "entropy"), candidates=torch.randint(61, (17, 3)))


@case("a million tokens")
def many_tokens() -> None:
    """On a CPU as many as make several chunks; each token's own numbers are those of a few alone."""
    n = 1_000_000 if DEVICE == "cuda" else 300
    budget = None if DEVICE == "cuda" else 40_000
    ops = moved(operands((n,), 3, 37, dtype=torch.float32))
    some = torch.tensor([0, 1, n // 2, n - 2, n - 1], device=DEVICE)
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, memory_budget=budget, backend="triton")
    few = ll.token_stats(ops.hidden[some], ops.head, ops.labels[some], backend="triton")
    torch.testing.assert_close(stats.logprob[some], few.logprob)
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, memory_budget=budget, backend="triton")
    wanted = F.cross_entropy(F.linear(ops.hidden, ops.weight, ops.bias), ops.labels)
    _same_gradients(loss, wanted, ops)


@case("products into rows that lie apart")
def products() -> None:
    """In the operands' own dtype on a GPU, with fp32 results; `add_product` adds to what is there."""
    narrow = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    h, w = (torch.randn(n, 40, device=DEVICE).to(narrow) for n in (24, 72))
    out = torch.zeros(24, 96, device=DEVICE)[:, :72]
    tiles.product(h, w.t(), out)
    exact = h.double() @ w.double().t()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
    tiles.add_product(h, w.t(), out)
    torch.testing.assert_close(out.double(), 2 * exact, rtol=1e-5, atol=1e-4)
    total = torch.ones(90, 40, device=DEVICE)
    dz = out.to(narrow)
    tiles.add_product(dz.t(), h, total[9:81])
    torch.testing.assert_close(total[9:81].double(), 1 + dz.double().t() @ h.double(), rtol=1e-4, atol=1e-3)
    assert bool((total[81:] == 1).all())


class Launches(TorchDispatchMode):
    """Counts the operators that compute something, and this backend's kernels under the interpreter."""

    FREE = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        nothing = isinstance(out, torch.Tensor) and out.numel() == 0
        poison = name == "fill_" and (args[1] != args[1] or args[1] >= 1 << 29)  # what tests put into empty memory
        self.count += not (func.is_view or name in self.FREE or nothing or poison)
        return out

    def of(self, step: Callable[[], object]) -> int:
        """How many a step takes, once everything is compiled."""
        from torch.utils._python_dispatch import _disable_current_modes
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def counted(kernel: object, *args: object, **kwargs: object) -> None:
            self.count += 1
            with _disable_current_modes():
                launch(kernel, *args, **kwargs)

        step()
        with patch.object(GridExecutor, "__call__", counted), self:
            step()
        return self.count


@case("few launches")
def few_launches() -> None:
    """A launch takes microseconds whatever it does, and a decode step has 300 of them in all."""
    if DEVICE == "cuda":
        return
    ops = operands((3,), 7, 301, dtype=torch.float32, bias=False)
    noise = Noise(torch.arange(3), torch.zeros(3, dtype=torch.int64))
    options = {"backend": "triton", "memory_budget": 1 << 20}
    labels, head = ops.labels, ops.head

    def values() -> None:
        with torch.no_grad():
            ll.token_stats(ops.hidden, head, labels, want=("logprob", "entropy"), **options)

    def loss() -> None:
        ll.linear_cross_entropy(ops.hidden, head, labels, **options).backward()

    found = [Launches().of(step) for step in (lambda: _drawn(ops, {"noise": noise}, "triton"), values, loss)]
    assert all(n <= most for n, most in zip(found, (20, 16, 52), strict=True)), found


class Waits(TorchDispatchMode):
    """Counts the operators that need a number of the device's, but for the lists that are asked for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
        return func(*args, **(kwargs or {}))


@case("labels are asked about at once")
def one_wait() -> None:
    """One list of numbers a call, and where tokens are ignored which: nothing in backward."""
    ops = moved(operands((9,), 7, 301, dtype=torch.float32, bias=False).training("hidden", "weight"))
    for ignored in (False, True):
        labels = torch.where(ops.labels < 0, 5, ops.labels)
        labels[2] = -100 if ignored else 5
        waits = Waits()
        with waits:
            stats = ll.token_stats(ops.hidden, ops.head, labels, candidates=labels[:, None].clamp(0), backend="triton")
            stats.logprob.sum().backward()
            ll.linear_cross_entropy(ops.hidden, ops.head, labels, backend="triton").backward()
        assert waits.count == 2 * ignored, waits.count


class Options:
    """Which values each kernel's options had, of all kernels that the interpreter ran."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, set[object]]] = {}

    def watch(self) -> AbstractContextManager[object]:
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def seen(kernel: Any, *args: Any, **kwargs: Any) -> None:
            there = {name: x for name, x in kwargs.items() if name in inspect.getfullargspec(kernel.fn).args}
            given = inspect.getcallargs(kernel.fn, *args, **there)
            options = self.seen.setdefault(kernel.fn.__name__, {})
            for name, x in given.items():
                if name.isupper():
                    options.setdefault(name, set()).add(x)
            launch(kernel, *args, **kwargs)

        return patch.object(GridExecutor, "__call__", seen)

    def one_sided(self) -> list[str]:
        """Switches that were never on, or never off."""
        pairs = [(kernel, name, x) for kernel, options in self.seen.items() for name, x in options.items()]
        return [f"{kernel} {name}" for kernel, name, x in pairs if len(x) == 1 and isinstance(*x, bool)]


def run_case(name: str) -> str:
    """'' or what went wrong."""
    torch.manual_seed(0)
    try:
        CASES[name]()
    except Exception:  # reported as this case's result
        return traceback.format_exc()
    return ""


def main(arguments: list[str] | None = None) -> int:
    global DEVICE
    parser = argparse.ArgumentParser(prog="python -m tests.support.vocab.triton_cases", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after these")
    parser.add_argument("--share", default="0/1", help="every k-th case, as in 1/4")
    parser.add_argument("--report", type=Path, help="JSON lines: the names, each case as it begins and as it ends")
    options = parser.parse_args(arguments)
    DEVICE = options.device
    poison()
    if options.serve:
        for line in sys.stdin:
            print(json.dumps({"error": run_case(line.strip())}), flush=True)
        return 0
    first, step = map(int, options.share.split("/"))
    chosen, seen = [*(options.names or CASES)][first::step], Options()
    with seen.watch() if options.report is not None and DEVICE == "cpu" else nullcontext():
        ended, failed = run_cases(chosen, options.seconds, options.report)
    note(options.report, kernels=sorted(seen.seen), one_sided=seen.one_sided())
    print(f"{failed} failed, {len(chosen) - ended} not run of {len(chosen)} on {DEVICE}")
    return int(bool(failed))


def run_cases(names: list[str], seconds: float, report: Path | None = None) -> tuple[int, int]:
    """How many began within the seconds, and failed; each is in the report before it begins, for it may not end."""
    ended = failed = 0
    start = time.perf_counter()
    note(report, names=names)
    for name in names:
        begin = time.perf_counter()
        if begin - start > seconds:
            break
        note(report, begun=name)
        error = run_case(name)
        took = time.perf_counter() - begin
        note(report, ended=name, seconds=round(took, 2), error=error[-2000:])
        ended, failed = ended + 1, failed + bool(error)
        print(f"{'FAILED' if error else 'ok':6} {took:6.2f} s  {name}", flush=True)
        if error:
            print(error, flush=True)
    return ended, failed


def note(report: Path | None, **line: Any) -> None:
    """One write, as several processes may share the report."""
    if report is not None:
        with report.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
