"""Weighted sums of a table's rows: values and gradients with repeated ids, any dtype, and stacked steps."""

import pytest
import torch
from torch import Tensor

from logitless import relax
from logitless.relax.rows import rows_dot, rows_sum
from logitless.vocab.backends.rows import _blocks
from tests.support.relax.comparing import assert_gradients, some_noise
from tests.support.vocab.comparing import operands

N, K, V, H = 6, 11, 8, 5  # more ids than entries: every row has duplicates


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("block", [1, 60, 1 << 19])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dot_and_sum_with_duplicates(dtype, block, monkeypatch):
    monkeypatch.setattr("logitless.vocab.backends.rows.BLOCK", block)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, w, table, ids = leaf(N, H, dtype=wide), leaf(N, K, dtype=wide), leaf(V, H, dtype=dtype), torch.randint(V, (N, K))
    exact_x, exact_w, exact = (t.detach().double().requires_grad_() for t in (x, w, table))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    dot = rows_dot(x, table, ids)
    assert_gradients([dot], [x, table], [(exact_x @ exact.T).gather(1, ids)], [exact_x, exact], tolerance)
    spread = torch.zeros(N, V, dtype=torch.float64).scatter_add(1, ids, exact_w)
    assert_gradients([rows_sum(w, table, ids)], [w, table], [spread @ exact], [exact_w, exact], tolerance)


@pytest.mark.parametrize("block", [1, 5, 60, 10_000])
def test_blocks_hold_each_row_once_and_no_more_than_they_may(block, monkeypatch):
    """Also where one token's k rows alone are more than a block."""
    monkeypatch.setattr("logitless.vocab.backends.rows.BLOCK", block)
    seen = torch.zeros(N, K)
    for n, k in _blocks(seen.long(), torch.empty(V, H)):
        seen[n, k] += 1
        assert seen[n, k].numel() * H <= max(block, H)
    assert bool((seen == 1).all())


def test_gradcheck():
    ids = torch.randint(V, (3, 4))
    assert torch.autograd.gradcheck(lambda x, t: rows_dot(x, t, ids), (leaf(3, H), leaf(V, H)))
    assert torch.autograd.gradcheck(lambda w, t: rows_sum(w, t, ids), (leaf(3, 4), leaf(V, H)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_soft_embedding_in_another_models_table(dtype):
    """A reward model's own table, of another width and dtype, without the policy's padding."""
    ops = operands((2, 3), 4, 30, dtype=torch.float32, vocab_size=27)
    soft = relax.gumbel_topk(ops.hidden, ops.head, 1.0, k=5, noise=some_noise((2, 3)))
    table = leaf(27, 7, dtype=dtype)
    out = relax.soft_embedding(soft, table)
    assert out.dtype == dtype
    assert out.shape == (2, 3, 7)
    expected = soft.dense().double() @ table.double()
    rounding = {torch.bfloat16: 2**-8, torch.float32: 2e-7, torch.float64: 1e-14}[dtype]
    error = float((out.double() - expected).detach().abs().max())
    assert error <= rounding * float(expected.detach().abs().max())
    grad = torch.autograd.grad(out, table, torch.ones_like(out), retain_graph=True)[0]
    assert grad.dtype == dtype
    wanted = torch.autograd.grad(expected, table, torch.ones_like(expected))[0]
    assert float((grad - wanted).abs().max()) <= rounding * float(wanted.abs().max())


def test_differences_of_gradients_survive_low_precision():
    """Rows that share a large part: dweights in fp32 keep what tells them apart, which bf16 sums would lose."""
    common = torch.full((V, 64), 4.0)
    table = (common + 2**-5 * torch.randn(V, 64)).bfloat16()
    w = torch.full((1, V), 1 / V).requires_grad_()
    ids = torch.arange(V)[None]
    g = torch.randn(1, 64)
    (found,) = torch.autograd.grad(rows_sum(w, table, ids), w, g)
    wanted = g.double() @ table.double().T
    spread = (wanted - wanted.mean()).abs().max()
    assert float((found.double() - wanted).abs().max()) < 1e-4 * float(spread)


def test_stacked_steps_are_a_sequence():
    ops = operands((2,), 4, 30)
    steps = [relax.gumbel_topk(ops.hidden, ops.head, 1.0, k=5, noise=some_noise((2,))) for _ in range(3)]
    table = leaf(30, 7)
    whole = relax.SoftTokens.stack(steps)
    assert whole.ids.shape == (2, 3, 5)
    assert whole.token.shape == whole.outside.shape == (2, 3)
    each = torch.stack([relax.soft_embedding(s, table) for s in steps], 1)
    torch.testing.assert_close(relax.soft_embedding(whole, table), each)
    torch.testing.assert_close(whole.dense(), torch.stack([s.dense() for s in steps], 1))
