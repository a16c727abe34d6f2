"""Sums and weights by the kernel of the products: no slice of logits, and one launch in the place of three."""

import unittest
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import logitless as ll
from bench.gpu.rows import runs_weights
from logitless.algebra.costs import Price
from logitless.vocab.backends.chunk import Scratch
from logitless.vocab.backends.triton import backend, weights
from logitless.vocab.call.validate import flatten
from logitless.vocab.passes.price import planned, slices_for
from tests.support.plain import halved, over
from tests.support.vocab.comparing import Operands, operands
from tests.support.vocab.triton_calls import half_products, no_kernel_for_slices, sizes

N, H, V = 40, 24, 1031
GRADIENT = 2**-7  # of the largest entry: p and hidden states are rounded to bf16, which the interpreter cuts off


class Wide:
    """The kernel with operands in fp32, of the same numbers: the interpreter multiplies the bits of bf16 ones."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(x: Any, entries: Any, *others: Any, **options: Any) -> None:
            wide = (replace(y, base=y.base.float()) for y in (x, entries))
            self.kernel[grid](*wide, *others, **options)

        return launch


def skip_where_it_does_not_run(device: str) -> None:
    if device == "cuda" and not runs_weights():
        raise unittest.SkipTest("for the descriptors and the shared memory of compute capability 9 and 10")


@contextmanager
def weights_written(device: str) -> Iterator[None]:
    """With no other kernel that accumulates; in blocks that divide nothing, but on a GPU in those of the table."""
    skip_where_it_does_not_run(device)
    changes = {"used": 1}
    with ExitStack() as stack:
        if device == "cpu":
            kernel = weights.weighing.weigh_products
            stack.enter_context(patch.object(weights.weighing, "weigh_products", Wide(kernel)))
            changes |= {"rows": 16, "entries": 128, "again": 64, "inner": 16}
        sums = {name: x for name, x in changes.items() if name != "again"}
        stack.enter_context(sizes(device, weights=changes, sums=sums))
        stack.enter_context(half_products(device))
        stack.enter_context(no_kernel_for_slices())
        stack.enter_context(patch.object(backend.differentiating, "logits_grad_slice", None))
        yield


def losses(ops: Operands, **options) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Ours, its gradients, and those of dense float64."""
    up, device = torch.tensor(0.25), ops.hidden.device.type
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    exact = ops.to(torch.float64)
    z = exact.hidden @ exact.weight.T * exact.head.scale
    lse = z.logsumexp(-1)
    each = lse - (1 - smoothing) * z.gather(1, ops.labels[:, None])[:, 0] - smoothing * z.mean(-1) + z_loss * lse**2
    true = torch.autograd.grad(each.mean(), [exact.hidden, exact.weight], up.double().to(device))
    with weights_written(device):
        mine = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton", **options)
        found = torch.autograd.grad(mine, [ops.hidden, ops.weight], up.to(device))
    torch.testing.assert_close(mine.double(), each.mean().detach(), rtol=2e-5, atol=2e-5)
    return mine, list(found), list(true)


def held(found: list[Tensor], true: list[Tensor]) -> None:
    for got, right in zip(found, true, strict=True):
        assert float((got.double() - right).abs().max() / right.abs().max()) < GRADIENT


@halved
@over("options", {"plain": {}, "all": {"label_smoothing": 0.1, "z_loss": 1e-3}})
@over("budget", [None, 60_000])
def test_a_loss_and_its_gradients(options, budget, device):
    ops = operands((N,), H, V, dtype=torch.bfloat16, bias=False, spread=2.0).on(device)
    _, found, true = losses(ops, memory_budget=budget, **options)
    held(found, true)


@halved
@over("processors", {"a block each": 0, "a few programs": 1})
@over("spread", [30.0, 300.0])
def test_labels_far_below_the_maximum(spread, processors, device):
    """Weights relative to the label's logit would overflow: such blocks of tokens are made a second time."""
    ops = operands((N,), H, V, dtype=torch.bfloat16, bias=False, spread=spread).on(device)
    with patch.object(weights, "processors", lambda _: processors):
        _, found, true = losses(ops)
    held(found, true)


def test_a_policy_loss_of_scaled_logits_with_a_temperature_each(device):
    ops = operands((N,), H, V, dtype=torch.bfloat16, bias=False, scale=0.7).on(device)
    temperature, advantages = (torch.rand(N, device=device) + 0.5 for _ in range(2))
    exact = ops.to(torch.float64)
    z = exact.hidden @ exact.weight.T * 0.7 / temperature.double()[:, None]
    logprob = z.log_softmax(-1).gather(1, ops.labels[:, None])[:, 0]
    true = torch.autograd.grad(-(logprob * advantages).sum(), [exact.hidden, exact.weight])
    with weights_written(device):
        loss = ll.token_loss(
            lambda stats, a: -a * stats.logprob,
            *(ops.hidden, ops.head, ops.labels),
            want=("logprob",),
            inputs=(advantages,),
            temperature=temperature,
            reduction="sum",
            backend="triton",
        )
        found = torch.autograd.grad(loss, [ops.hidden, ops.weight])
    held(list(found), list(true))


@over("trained", ["hidden", "weight"])
def test_one_gradient_and_once_more(trained, device):
    """A second backward takes the same steps."""
    ops = operands((N,), H, V, dtype=torch.bfloat16, bias=False).training(trained).on(device)
    with weights_written(device):
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton")
        leaf = getattr(ops, trained)
        (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, second)


def test_nan_stays_where_it_was(device):
    ops = operands((N,), H, V, dtype=torch.bfloat16, bias=False)
    with torch.no_grad():
        ops.hidden[3] = torch.nan
    ops = ops.training("hidden").on(device)
    with weights_written(device):
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton")
        (found,) = torch.autograd.grad(loss, ops.hidden)
    assert found.isnan().all(1).nonzero().flatten().tolist() == [3]
    assert int(found.isnan().any(1).sum()) == 1


@over("labelled", [True, False])
@over("spread", [2.0, 30.0, 300.0])
def test_statistics(spread, labelled, device):
    ops = operands((N,), H, V, dtype=torch.bfloat16, bias=False, scale=0.7, spread=spread).training().on(device)
    temperature = torch.rand(N, device=device) + 0.5
    z = ops.hidden.double() @ ops.weight.double().T * 0.7 / temperature.double()[:, None]
    logp = z.log_softmax(-1)
    true = {"logsumexp": z.logsumexp(-1), "entropy": -(logp.exp() * logp).sum(-1)}
    true |= {"logprob": logp.gather(1, ops.labels[:, None])[:, 0]} if labelled else {}
    labels = ops.labels if labelled else None
    with weights_written(device), patch.object(backend, "SUMMED_TOKENS", 24):  # which is not all at once
        options = {"temperature": temperature, "backend": "triton"}
        found = ll.token_stats(ops.hidden, ops.head, labels, want=tuple(true), **options)
    for name, right in true.items():
        torch.testing.assert_close(getattr(found, name).double(), right, rtol=2e-6, atol=2e-5)


@over("gap", [4.0, 10.0, 16.0])
def test_a_nearly_certain_token_keeps_its_entropys_digits(gap, device):
    """Its largest logit is a sum of its own, beside which the others' would be lost."""
    hidden = torch.eye(8, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(300, 8, dtype=torch.bfloat16, device=device)
    weight[7], weight[150:] = gap, -1.0
    logp = (hidden.double() @ weight.double().T).log_softmax(-1)
    with weights_written(device):
        found = ll.token_stats(hidden, ll.LMHead(weight), None, want=("entropy",), backend="triton").entropy
    torch.testing.assert_close(found.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=0)


@halved
@over("used", [0, 1])
@over("want", {"values": (), "trained": ("hidden", "weight")})
def test_slices_keep_to_the_budget(want, used, device):
    """Also those of a backward pass, whose forward pass adds up its products."""
    if device == "cuda":
        raise unittest.SkipTest("of the sizes that a CPU is given here")
    budget = 50_000
    ops = operands((64,), H, V, dtype=torch.bfloat16, bias=False).training(*want)
    largest, take = [], Scratch.take

    def seen(self, name, like, columns=False):
        out = take(self, name, like, columns)
        largest.append(out.nbytes if name.startswith("z") else 0)
        return out

    with half_products(device), sizes(device, sums={"used": used}), patch.object(Scratch, "take", seen):
        said = ll.explain(ops.hidden, ops.head, ops.labels, memory_budget=budget, backend="triton")
        assert said.slices.nbytes <= budget
        if want:
            with patch.object(backend, "sum_products", None):  # another product's numbers than backward's
                stats = ll.token_stats(
                    ops.hidden, ops.head, ops.labels, want=("logprob",), memory_budget=budget, backend="triton"
                )
            torch.autograd.grad(stats.logprob.sum(), list(ops.leaves.values()))
    assert max(largest, default=0) <= budget


def test_maxima_over_tokens_read_slices_within_the_budget(device):
    """`max_pool_logits` looks at the logits themselves, which no sum does."""
    if device == "cuda":
        raise unittest.SkipTest("of the sizes that a CPU is given here")
    hidden, head = torch.randn(64, H, dtype=torch.bfloat16), ll.LMHead(torch.randn(V, H, dtype=torch.bfloat16))
    call = flatten(hidden, head, None, want=("logsumexp",), backend="triton", memory_budget=50_000)
    with half_products(device), sizes(device, sums={"used": 1}):
        assert not slices_for(call, 64, Price("values", 1)).in_products
        assert planned(call, Price("values", 1))[1].in_products


def test_where_hidden_states_begin_is_asked_once(device):
    """Tokens that are left out make a copy which begins elsewhere."""
    whole = torch.randn(N * H + 1, dtype=torch.bfloat16, device=device)
    hidden = whole[1:].view(N, H).requires_grad_()
    head = ll.LMHead(torch.randn(V, H, dtype=torch.bfloat16, device=device))
    labels = torch.randint(V, (N,), device=device)
    labels[3] = -100
    with half_products(device), sizes(device, weights={"used": 1}), patch.object(backend, "weigh_products", None):
        logprob = ll.token_stats(hidden, head, labels, want=("logprob",), backend="triton").logprob
    z = hidden.double() @ head.weight_tensor.double().T
    true = z.log_softmax(-1).gather(1, labels.clamp(0)[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), torch.where(labels < 0, 0.0, true), rtol=2e-6, atol=2e-5)


@halved
@over("budget", [None, 60_000])
@over("spread", [2.0, 300.0])
def test_a_frozen_heads_logprobs_with_any_upstream(spread, budget, device):
    ops = operands((N,), H, V, dtype=torch.bfloat16, bias=False, spread=spread).training("hidden").on(device)
    exact, up = ops.to(torch.float64), torch.randn(N, device=device)
    logprob = (exact.hidden @ exact.weight.T).log_softmax(-1).gather(1, ops.labels[:, None])[:, 0]
    true = torch.autograd.grad(logprob, exact.hidden, up.double())
    with weights_written(device):
        options = {"memory_budget": budget, "backend": "triton"}
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob",), **options)
        found = torch.autograd.grad(stats.logprob, ops.hidden, up)
    torch.testing.assert_close(stats.logprob.double(), logprob, rtol=2e-6, atol=2e-5)
    held(list(found), list(true))


@over("budget", {"one chunk": None, "several": 60_000})
def test_one_product_that_is_all_of_a_gradient_is_rounded_once(budget, device):
    """In the head's own dtype: no sum in fp32 beside it, which several chunks need."""
    ops = operands((N,), H, V, dtype=torch.bfloat16, bias=False).training("weight").on(device)
    with weights_written(device), patch.object(backend, "weights_grad", wraps=backend.weights_grad) as formed:
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, memory_budget=budget, backend="triton")
        (found,) = torch.autograd.grad(loss, ops.weight)
        said = ll.explain(ops.hidden, ops.head, ops.labels, loss=True, memory_budget=budget, backend="triton")
    assert said.gradient_bytes == V * H * (2 if budget is None else 4 + 2)
    summed = {call.args[3].weight.dtype for call in formed.call_args_list}
    assert summed == {torch.bfloat16 if budget is None else torch.float32}
    assert found.dtype == torch.bfloat16


def test_a_gradient_in_fp32_is_summed_in_fp32(device):
    ops = operands((N,), H, V, dtype=torch.bfloat16, bias=False).training("weight").on(device)
    ops.weight.grad_dtype = torch.float32
    with weights_written(device):
        ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="triton").backward()
    assert ops.weight.grad.dtype == torch.float32
    assert (ops.weight.grad.bfloat16().float() != ops.weight.grad).any()


@over("budget", [60_000, 200_000])
def test_twice_as_many_tokens_share_a_chunk(budget, device):
    """A weight takes half of a logit's bytes."""
    skip_where_it_does_not_run(device)
    ops = operands((400,), H, V, dtype=torch.bfloat16, bias=False).on(device)
    said = []
    for used in (0, 1):
        with half_products(device), sizes(device, weights={"used": used}):
            said.append(ll.explain(ops.hidden, ops.head, ops.labels, loss=True, memory_budget=budget, backend="triton"))
    assert 1.7 < said[1].slices.tokens / said[0].slices.tokens < 2.3


def test_gradients_are_nearer_to_float64_than_bf16_torchs(device):
    ops = operands((300,), H, V, dtype=torch.bfloat16, bias=False, spread=2.0).on(device)
    plain = torch.nn.functional.cross_entropy(ops.hidden @ ops.weight.T, ops.labels) / 4
    theirs = torch.autograd.grad(plain, [ops.hidden, ops.weight])
    _, found, true = losses(ops)
    for mine, other, right in zip(found, theirs, true, strict=True):
        assert (mine.double() - right).norm() <= (other.double() - right).norm()
