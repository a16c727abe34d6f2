"""Top-k Gumbel-softmax against whole rows in float64: weights, tokens, soft embeddings and every gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from logitless import relax
from logitless.vocab.reference import dense_logits
from tests.support.relax.comparing import TOLERANCE, assert_gradients, dense_weights, some_noise
from tests.support.vocab.comparing import Operands, operands

V, H, E = 47, 6, 5
TRANSFORMS = [{}, {"scale": 0.6}, {"softcap": 4.0}, {"scale": 1.5, "softcap": 5.0, "vocab_size": V - 6}]
TRANSFORMS += [{"ranks": (3,)}, {"ranks": (2, 4), "scale": 0.7, "softcap": 6.0, "bias": False}]
K = [1, 2, 9, V - 6]


def table_for(ops: Operands, dtype: torch.dtype) -> Tensor:
    return torch.randn(ops.weight.shape[0], E, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("k", [*K, 0])
def test_against_dense(k, hard, transform, dtype):
    """The soft embedding in two tables, and its gradients to hidden, weight, bias and both tables."""
    ops = operands((2, 3), H, V, dtype=dtype, spread=1.5, **transform)
    tables = table_for(ops, dtype), table_for(ops, dtype)
    noise, tau = some_noise((2, 3)), 0.8
    soft = relax.gumbel_topk(ops.hidden, ops.head, tau, k=k, hard=hard, noise=noise, embeddings=tables)
    exact = ops.to(torch.float64)
    wide = [t.detach().double().requires_grad_() for t in tables]
    weights, token = dense_weights(exact, tau, noise, k, hard)
    assert torch.equal(soft.token, token)
    expected = [weights @ t[: weights.shape[-1]] for t in wide]
    leaves = [*ops.leaves.values(), *tables]
    assert_gradients(list(soft.embedded), leaves, expected, [*exact.leaves.values(), *wide], TOLERANCE[dtype])


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("k", K)
def test_weights_and_ids(k, hard):
    ops = operands((2, 3), H, V, dtype=torch.float32)
    noise = some_noise((2, 3))
    soft = relax.gumbel_topk(ops.hidden, ops.head, 1.3, k=k, hard=hard, noise=noise)
    exact = ops.to(torch.float64)
    weights, token = dense_weights(exact, 1.3, noise, k, hard)
    assert torch.equal(soft.ids, dense_logits(exact.hidden, exact.head).topk(k).indices)
    assert torch.equal(soft.token, token)
    assert_gradients([soft.dense()], list(ops.leaves.values()), [weights], list(exact.leaves.values()), 2e-5)
    if hard:
        assert torch.equal(soft.weights.detach().sum(-1), torch.ones(2, 3))
        assert torch.equal(soft.weights.detach().argmax(-1), (soft.ids == token[..., None]).long().argmax(-1))
        assert set(soft.weights.detach().unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("k", [8, 0])
def test_low_precision_operands(k):
    """bf16 hidden states, head and table: fp32 arithmetic on the same numbers, rounded at the end only."""
    ops = operands((4,), H, V, dtype=torch.bfloat16)
    table = table_for(ops, torch.bfloat16)
    noise = some_noise((4,))
    soft = relax.gumbel_topk(ops.hidden, ops.head, 0.7, k=k, noise=noise, embeddings=(table,))
    assert soft.weights.dtype == torch.float32
    assert soft.embedded[0].dtype == torch.bfloat16
    exact, wide = ops.to(torch.float64), table.detach().double().requires_grad_()
    expected = dense_weights(exact, 0.7, noise, k, False)[0] @ wide
    got = soft.embedded[0]
    assert float((got.double() - expected).detach().abs().max()) <= 2**-8 * float(expected.detach().abs().max())
    up = torch.randn(4, E).bfloat16()
    found = torch.autograd.grad(got, [*ops.leaves.values(), table], up)
    wanted = torch.autograd.grad(expected, [*exact.leaves.values(), wide], up.double())
    for g, w in zip(found, wanted, strict=True):
        assert float((g.double() - w).abs().max()) <= 2**-8 * float(w.abs().max())


@pytest.mark.parametrize("k", [6, 0])
@pytest.mark.parametrize("trainable", [(), ("hidden",), ("weight",), ("bias",), ("hidden", "bias")], ids=str)
def test_only_what_trains_gets_a_gradient(trainable, k):
    ops = operands((3,), H, V).training(*trainable)
    table = torch.randn(V, E, dtype=torch.float64)
    noise = some_noise((3,))
    out = relax.gumbel_topk(ops.hidden, ops.head, 1.0, k=k, noise=noise, embeddings=(table,)).embedded[0]
    assert out.requires_grad == bool(trainable)
    if trainable:
        exact = ops.to(torch.float64)
        expected = dense_weights(exact, 1.0, noise, k, False)[0] @ table
        assert_gradients([out], list(ops.leaves.values()), [expected], list(exact.leaves.values()), 1e-10)


def test_the_whole_vocabulary_two_ways():
    """k=V and k=0 are one method, up to rounding: the same token, the same soft row."""
    ops = operands((5,), H, V, dtype=torch.float32)
    table = torch.randn(V, E)
    noise = some_noise((5,))
    for hard in (False, True):
        a, b = (
            relax.gumbel_topk(ops.hidden, ops.head, 0.5, k=k, hard=hard, noise=noise, embeddings=(table,))
            for k in (V, 0)
        )
        assert torch.equal(a.token, b.token)
        torch.testing.assert_close(a.embedded[0], b.embedded[0], rtol=1e-5, atol=1e-5)
    assert float(a.outside.max()) <= 1e-6
    assert float(b.outside.max()) == 0.0


def test_results_do_not_depend_on_the_slices():
    """Tiny budgets change no token, and soft rows by rounding only."""
    ops = operands((9,), H, 3000, dtype=torch.float32)
    table = torch.randn(3000, E)
    noise = some_noise((9,))
    for k in (20, 0):
        a, b = (
            relax.gumbel_topk(ops.hidden, ops.head, 0.6, k=k, noise=noise, embeddings=(table,), memory_budget=budget)
            for budget in (None, 40_000)
        )
        assert torch.equal(a.token, b.token)
        torch.testing.assert_close(a.embedded[0], b.embedded[0], rtol=1e-5, atol=1e-5)
        order = torch.randperm(9)
        moved = relax.Noise(noise.seeds[order], noise.positions[order])
        c = relax.gumbel_topk(ops.hidden[order], ops.head, 1.0, k=k, noise=moved, embeddings=(table,))
        assert torch.equal(c.token, a.token[order])


@pytest.mark.parametrize("k", [4, 0])
def test_logits_that_are_minus_infinity(k):
    """Entries that a bias forbids get no weight and no gradient, also where fewer than k are left."""
    ops = operands((3,), H, V)
    bias = ops.bias.detach().clone()
    bias[3:] = -torch.inf
    head = type(ops.head)(ops.weight, bias)
    table = torch.randn(V, E, dtype=torch.float64)
    soft = relax.gumbel_topk(
        ops.hidden, head, 1.0, k=k, noise=some_noise((3,)), embeddings=(table,), memory_budget=2000
    )
    assert bool((soft.token < 3).all())
    grads = torch.autograd.grad(soft.embedded[0].sum(), [ops.hidden, ops.weight])
    assert all(bool(g.isfinite().all()) for g in grads)
    assert bool((grads[1][3:] == 0).all())


def test_small_temperatures_neither_overflow_nor_smear():
    ops = operands((4,), H, V, dtype=torch.float32)
    table = table_for(ops, torch.float32)
    for k in (V, 0):
        soft = relax.gumbel_topk(ops.hidden, ops.head, 1e-5, k=k, noise=some_noise((4,)), embeddings=(table,))
        torch.testing.assert_close(soft.embedded[0], table[soft.token])
        grads = torch.autograd.grad(soft.embedded[0].sum(), list(ops.leaves.values()))
        assert all(bool(g.isfinite().all()) for g in grads)


def test_coverage_is_the_mass_of_the_best():
    ops = operands((8,), H, V, dtype=torch.float32)
    p = dense_logits(ops.hidden, ops.head).softmax(-1)
    for k in (1, 5, 20):
        soft = relax.gumbel_topk(ops.hidden, ops.head, 1.0, k=k)
        torch.testing.assert_close(soft.coverage.double(), p.topk(k).values.sum(-1), rtol=0, atol=2e-6)
        assert not soft.outside.requires_grad
    many = relax.gumbel_topk(torch.randn(300, H), ops.head, 1.0, k=V)
    assert bool((many.outside >= 0).all())  # where rounding gives the best more than there is


def test_tokens_are_samples_of_the_best():
    """Frequencies over seeds against the softmax of the k best: chi-square with four degrees of freedom."""
    ops = operands((1,), H, V, dtype=torch.float32, spread=1.0).training()
    n = 4000
    hidden = ops.hidden.expand(n, H)
    noise = relax.Noise(torch.arange(n), torch.zeros(n, dtype=torch.int64))
    soft = relax.gumbel_topk(hidden, ops.head, 0.5, k=5, noise=noise)
    top = dense_logits(ops.hidden, ops.head)[0].topk(5)
    expected = top.values.softmax(0) * n
    counts = torch.stack([(soft.token == i).sum() for i in top.indices]).double()
    assert int(counts.sum()) == n
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # one in a thousand


@pytest.mark.parametrize("k", [5, 0])
def test_generators_and_checkpointing(k):
    """A generator repeats itself; with keyed noise recomputation under checkpointing meets the same tokens."""
    ops = operands((4,), H, V)
    table = torch.randn(V, E, dtype=torch.float64)

    def run(hidden: Tensor, **options) -> relax.SoftTokens:
        return relax.gumbel_topk(hidden, ops.head, 1.0, k=k, embeddings=(table,), **options)

    first, again = (run(ops.hidden, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first.embedded[0], again.embedded[0])
    noise = some_noise((4,))
    plain = run(ops.hidden, noise=noise).embedded[0]
    checked = torch.utils.checkpoint.checkpoint(
        lambda h: run(h, noise=noise).embedded[0], ops.hidden, use_reentrant=False
    )
    grads = [torch.autograd.grad(x.sum(), ops.hidden)[0] for x in (plain, checked)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("k", [5, 0])
def test_under_autocast_arithmetic_stays_exact(k):
    ops = operands((4,), H, V, dtype=torch.bfloat16)
    table = torch.randn(V, E)
    noise = some_noise((4,))

    def run() -> Tensor:
        return relax.gumbel_topk(ops.hidden, ops.head, 1.0, k=k, noise=noise, embeddings=(table,)).embedded[0]

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        cast = run()
        grad = torch.autograd.grad(cast.sum(), ops.hidden)[0]
    assert torch.equal(plain, cast)
    assert torch.equal(grad, torch.autograd.grad(plain.sum(), ops.hidden)[0])


@pytest.mark.parametrize("k", [5, 0])
def test_empty_batches_keep_the_graph(k):
    ops = operands((0,), H, V)
    table = torch.randn(V, E, dtype=torch.float64)
    soft = relax.gumbel_topk(ops.hidden, ops.head, 1.0, k=k, embeddings=(table,))
    assert soft.embedded[0].shape == (0, E)
    soft.embedded[0].sum().backward()
    assert bool((ops.weight.grad == 0).all())


@pytest.mark.parametrize("k", [V, 0])
def test_adapters_drop_once(k):
    """One dropout mask for the logits and their gradient; the choice of the best does not drop."""
    ops = operands((3,), H, V, ranks=(2,), bias=False)
    (adapter,), p = ops.adapters, 0.4
    head = replace(ops.head, adapters=(replace(adapter, dropout=p),))
    table, noise = torch.randn(V, E, dtype=torch.float64), some_noise((3,))
    torch.manual_seed(3)
    out = relax.gumbel_topk(ops.hidden, head, 1.0, k=k, noise=noise, embeddings=(table,)).embedded[0]
    torch.manual_seed(3)
    keep = torch.empty(3, H, dtype=torch.bool).bernoulli_(1 - p).double() / (1 - p)
    z = ops.hidden @ ops.weight.T + adapter.scaling * (ops.hidden * keep) @ adapter.a.T @ adapter.b.T
    expected = (z + noise.gumbel(slice(0, V))).softmax(-1) @ table
    leaves = list(ops.leaves.values())
    assert_gradients([out], leaves, [expected], leaves, 1e-10)
