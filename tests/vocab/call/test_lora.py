"""Adapters as factors in the pass: values and every gradient of the dense float64 head with the same factors."""

from dataclasses import replace

import pytest
import torch

import logitless as ll
from logitless.vocab.head.low_rank import LowRank
from logitless.vocab.reference import dense_cross_entropy, dense_logits, dense_token_stats
from tests.support.vocab.comparing import (
    ALONE,
    EVERYTHING,
    assert_near,
    assert_near_in_norm,
    compare,
    operands,
)

BUDGETS = [None, 3000]  # the second cuts tokens and vocabulary
ALL = ("hidden", "weight", "bias", "a", "b")
TRAINABLE = [ALL, ("hidden", "a", "b"), ("a", "b"), ("a",), ("b",), ("hidden",), ("weight",), ("hidden", "a"), ()]
TRANSFORMS = [{}, {"scale": 0.7}, {"softcap": 4.0, "scale": 1.3}, {"vocab_size": 19, "softcap": 4.0}]
each_transform = pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
each_budget = pytest.mark.parametrize("budget", BUDGETS)


@each_budget
@each_transform
@pytest.mark.parametrize("ranks", [(1,), (3,), (2, 4)], ids=str)
@pytest.mark.parametrize("want", [("logprob",), ("logprob", "entropy"), ALONE], ids=len)
def test_every_statistic(want, ranks, transform, budget, backend):
    compare(operands((9,), ranks=ranks, **transform), want, memory_budget=budget, backend=backend)


@each_budget
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trainable", TRAINABLE, ids=str)
@pytest.mark.parametrize("want", [("logprob",), ("logprob", "self_certainty"), ("logprob", "entropy", "sum_sq_prob")])
def test_whatever_is_frozen(want, trainable, bias, budget, backend):
    ops = operands((2, 4), bias=bias, ranks=(3,)).training(*trainable)
    compare(ops, want, memory_budget=budget, backend=backend)


@each_budget
@each_transform
@pytest.mark.parametrize("trainable", [ALL, ("hidden", "a", "b"), ("hidden",)], ids=str)
def test_against_a_reference_with_adapters_of_its_own(trainable, transform, budget, backend):
    ops = operands((7,), reference=True, ranks=(2, 1), **transform).training(*trainable)
    compare(ops, EVERYTHING, jsd_beta=0.3, memory_budget=budget, backend=backend)


@each_budget
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", ["number", "per token"])
def test_best_entries_candidates_and_temperatures(temperature, softcap, budget, backend):
    ops = operands((7,), ranks=(3,), softcap=softcap)
    temperature = 0.7 if temperature == "number" else torch.rand(7, dtype=torch.float64) + 0.5
    ids = torch.randint(23, (7, 3))
    options = {"top_k": 4, "candidates": ids, "temperature": temperature}
    compare(ops, ("logprob", "max_logit"), memory_budget=budget, backend=backend, **options)
    compare(ops, ("label_logit",), memory_budget=budget, backend=backend, **options)  # no product in backward


@each_budget
@pytest.mark.parametrize("lead", [(2, 1, 5), (1,), (0,)])
def test_ignored_tokens_are_left_out_of_the_adapters_too(lead, budget, backend):
    ops = operands(lead, ranks=(2, 3))
    ops.labels.view(-1)[1::3] = -100
    compare(ops, ("logprob", "entropy"), memory_budget=budget, backend=backend)
    ops.labels[:] = -100
    compare(ops, ("logprob", "entropy"), memory_budget=budget, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainable", [ALL, ("hidden",)], ids=str)
def test_precision_is_that_of_the_operands(trainable, factors, dtype, backend):
    """The product of the hidden states with `a` is never rounded to the operands' dtype."""
    ops = operands((9,), 64, 300, dtype=dtype, ranks=(4,), spread=4.0)
    ops = replace(ops, adapters=tuple(replace(x, a=x.a.to(factors), b=x.b.to(factors)) for x in ops.adapters))
    ops = replace(ops, bias=None)
    exact, wanted = ops.to(torch.float64), ("logprob", "entropy")
    got = ll.token_stats(ops.hidden, ops.head, ops.labels, want=wanted, backend=backend)
    z = dense_logits(exact.hidden, exact.head)
    expected = z.log_softmax(-1).gather(-1, ops.labels[:, None])[:, 0]
    assert_near(got.logprob.detach(), expected.detach(), 2e-5)
    leaves = ops.training(*trainable).leaves if dtype == factors else {}
    if leaves:
        compare(ops.training(*trainable), wanted, tolerance=2e-5 if dtype == torch.float32 else 5e-3, backend=backend)


@each_budget
@each_transform
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("trainable", [ALL, ("hidden", "a", "b"), ("b",), ("a",)], ids=str)
def test_linear_cross_entropy(trainable, reduction, transform, budget, backend):
    ops = operands((8,), ranks=(3, 2), **transform).training(*trainable)
    ops.labels[2] = -100
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2}
    expected = dense_cross_entropy(ops.hidden, ops.head, ops.labels, **options)
    got = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, **options, memory_budget=budget, backend=backend)
    assert_near(got.detach(), expected.detach(), 1e-10)
    up, leaves = torch.randn_like(expected), list(ops.leaves.values())
    wanted = torch.autograd.grad(expected, leaves, up)
    for name, g, w in zip(ops.leaves, torch.autograd.grad(got, leaves, up), wanted, strict=True):
        assert_near_in_norm(g, w, 1e-10, name)


@each_budget
@pytest.mark.parametrize("trainable", [ALL, ("hidden", "a", "b")], ids=str)
def test_two_backwards_of_token_loss(trainable, budget, backend):
    """The first gives its gradients away, the second computes them again."""
    ops = operands((7,), ranks=(3,), softcap=4.0).training(*trainable)
    loss = ll.token_loss(
        lambda s: s.entropy - s.logprob, ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"),
        memory_budget=budget, backend=backend,
    )  # fmt: skip
    z = dense_logits(ops.hidden, ops.head).log_softmax(-1)
    expected = -(z.gather(-1, ops.labels[:, None])[:, 0] + (z.exp() * z).sum(-1)).mean()
    leaves = list(ops.leaves.values())
    wanted = torch.autograd.grad(expected, leaves)
    for _ in range(2):
        for name, g, w in zip(ops.leaves, torch.autograd.grad(loss, leaves, retain_graph=True), wanted, strict=True):
            assert_near_in_norm(g, w, 1e-10, name)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trainable", [ALL, ("hidden", "a", "b")], ids=str)
def test_dropout_draws_one_mask_for_value_and_gradient(trainable, reduction, backend):
    """The oracle drops by F.dropout: same seed, same masks, one per adapter in order."""
    ops = operands((40,), 16, ranks=(3, 2)).training(*trainable)
    ops.adapters = tuple(replace(x, dropout=p) for x, p in zip(ops.adapters, (0.5, 0.2), strict=True))
    ops.labels[3] = -100
    leaves = list(ops.leaves.values())
    torch.manual_seed(5)
    got = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, reduction=reduction, backend=backend)
    torch.manual_seed(5)
    z = dense_logits(ops.hidden, ops.head).log_softmax(-1)
    expected = torch.nn.functional.nll_loss(z, ops.labels, reduction=reduction)
    assert_near(got.detach(), expected.detach(), 1e-10)
    up = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, up)
    for name, g, w in zip(ops.leaves, torch.autograd.grad(got, leaves, up), wanted, strict=True):
        assert_near_in_norm(g, w, 1e-10, name)
    other = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, reduction=reduction, backend=backend)
    assert not torch.allclose(other, got)


def test_dropped_half_precision_hidden_states_are_not_rounded_again(backend):
    ops = operands((64,), 64, 50, dtype=torch.bfloat16, bias=False, ranks=(4,)).training()
    ops.adapters = (replace(ops.adapters[0], dropout=0.3),)
    torch.manual_seed(5)
    got = ll.token_stats(ops.hidden, ops.head, ops.labels, backend=backend).logprob
    torch.manual_seed(5)
    keep = torch.empty(64, 64, dtype=torch.bool).bernoulli_(0.7)
    exact, (x,) = ops.to(torch.float64), ops.to(torch.float64).adapters
    z = exact.hidden @ exact.weight.T + x.scaling / 0.7 * (exact.hidden * keep) @ x.a.T @ x.b.T
    assert_near(got, z.log_softmax(-1).gather(-1, ops.labels[:, None])[:, 0], 2e-5)


def test_a_transposed_factor(backend):
    """PEFT's tied adapters are views of an embedding's."""
    ops = operands((7,), ranks=(3,))
    flipped = {n: getattr(ops.adapters[0], n).detach().t().contiguous().t().requires_grad_() for n in "ab"}
    ops.adapters = (replace(ops.adapters[0], **flipped),)
    assert not ops.adapters[0].b.is_contiguous()
    compare(ops, ("logprob", "entropy", "self_certainty"), backend=backend)


def test_a_merged_head_is_the_same_head(backend):
    ops = operands((6,), ranks=(3,))
    (x,) = ops.adapters
    merged = ll.LMHead(ops.weight + x.scaling * x.b @ x.a, ops.bias)
    got, expected = (ll.token_stats(ops.hidden, h, ops.labels, backend=backend).logprob for h in (ops.head, merged))
    assert_near(got.detach(), expected.detach(), 1e-10)
    plain = ll.token_stats(ops.hidden, replace(ops.head, adapters=()), ops.labels, backend=backend).logprob
    assert (plain - got).abs().max() > 0.1


def test_operands_are_never_written_to(backend):
    ops = operands((7,), ranks=(3, 2))
    before = [x.detach().clone() for x in ops.leaves.values()]
    ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend=backend).backward()
    ll.token_stats(ops.hidden, ops.head, ops.labels, backend=backend).logprob.sum().backward()
    assert all(torch.equal(x, y) for x, y in zip(ops.leaves.values(), before, strict=True))


WRONG = {
    "rank": lambda a, b: LowRank(a[:1], b),
    "no rank": lambda a, b: LowRank(a[:0], b[:, :0]),
    "vector": lambda a, b: LowRank(a[0], b),
    "integer": lambda a, b: LowRank(a.long(), b),
    "no tensor": lambda a, b: LowRank(a, None),
    "device": lambda a, b: LowRank(a.to("meta"), b),
    "scaling": lambda a, b: LowRank(a, b, float("nan")),
    "scaling beyond floats": lambda a, b: LowRank(a, b, 10**400),
    "dropout": lambda a, b: LowRank(a, b, 1.0, 1.0),
    "rows": lambda a, b: ll.LMHead(torch.randn(9, 4), adapters=(LowRank(a, b[:8]),)),
    "width": lambda a, b: ll.LMHead(torch.randn(9, 4), adapters=(LowRank(a[:, :3], b),)),
    "head's device": lambda a, b: ll.LMHead(torch.randn(9, 4).to("meta"), adapters=(LowRank(a, b),)),
    "no tuple": lambda a, b: ll.LMHead(torch.randn(9, 4), adapters=LowRank(a, b)),
    "no adapters": lambda a, b: ll.LMHead(torch.randn(9, 4), adapters=((a, b),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_factors_that_cannot_be(name):
    a, b = torch.randn(2, 4), torch.randn(9, 2)
    assert ll.LMHead(torch.randn(9, 4), adapters=(LowRank(a, b),)).adapters[0].a is a
    with pytest.raises(ll.errors.LogitlessError) as caught:
        WRONG[name](a, b)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(("LowRank: ", "LMHead: "))


@pytest.mark.parametrize("ranks", [(2,), (2, 3)], ids=str)
def test_fp16_adapters_under_autocast_to_bf16(ranks, backend):
    """Autocast's own `cat` refuses two fp16 tensors there."""
    ops = operands(dtype=torch.float16, bias=False, ranks=ranks).training(*ALL)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend=backend)
    rounded = ops.to(torch.bfloat16)
    exact = replace(rounded.to(torch.float64), adapters=ops.to(torch.float64).adapters)
    wanted = -dense_token_stats(exact.hidden, exact.head, exact.labels)["logprob"].mean()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(loss, list(ops.leaves.values()))
    expected = torch.autograd.grad(wanted, list(exact.leaves.values()))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float16
        assert_near_in_norm(a, b, 1e-2, "gradient")


def test_a_narrower_reference_with_adapters_under_fp64(backend):
    """Its adapters' products are formed in the call's own precision."""
    ops, ref = operands(ranks=(2,)), operands(ranks=(3,)).to(torch.float32)
    ops = replace(ops, ref=ref)
    got = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("kl",), reference=ops.reference, backend=backend)
    exact = dense_token_stats(ops.hidden, ops.head, ops.labels, want=("kl",), reference=ops.reference)
    torch.testing.assert_close(got.kl, exact["kl"], rtol=1e-12, atol=1e-12)
