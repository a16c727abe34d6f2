"""Sums and products of which each thread takes its own entries: the numbers of one thread, in the same places."""

import pytest
import torch

import logitless as ll
from logitless.resident import AllocationTracker
from logitless.vocab.backends.eager import threads
from logitless.vocab.backends.eager.threads import SHARE, TERMS, TOKENS, collect, maxima, shares_of, sums
from logitless.vocab.backends.logits import add_product
from tests.support.switches import put_back
from tests.support.vocab.comparing import assert_near_in_norm, operands


@pytest.fixture(params=[2, 3, 4])
def number(request):
    """How many threads torch has."""
    with put_back():
        torch.set_num_threads(request.param)
        yield request.param


def columns(tokens, entries):
    z = torch.randn(entries, tokens, generator=torch.Generator().manual_seed(entries))
    return z.t()


def taken(monkeypatch):
    """The shape of each sum over entries from here on."""
    found, usual = [], torch.sum

    def summed(x, dim):
        found.append(tuple(x.shape))
        return usual(x, dim)

    monkeypatch.setattr(torch, "sum", summed)
    return found


def test_each_thread_takes_its_entries(number, monkeypatch):
    z = columns(64, number * SHARE // 64)
    exact, plain = z.double().sum(1), (z.sum(1) - z.double().sum(1)).abs().max()
    shapes = taken(monkeypatch)
    found = sums(z)
    assert shapes == [(number, SHARE // 64, 64), (number, 64)]
    assert (found - exact).abs().max() <= 1.5 * plain + 1e-7 * exact.abs().max()
    assert torch.equal(maxima(z), z.amax(1))


def test_small_slices_have_fewer_shares(number, monkeypatch):
    shapes = taken(monkeypatch)
    sums(columns(64, 2 * SHARE // 64))
    assert shapes[0] == (2, SHARE // 64, 64)


@pytest.mark.parametrize("number", [2], indirect=True)
@pytest.mark.parametrize(
    "z",
    [
        pytest.param(torch.ones(64, 2 * SHARE // 64), id="rows"),
        pytest.param(torch.ones(2 * SHARE // 64 + 1, 64).t(), id="a rest"),
        pytest.param(torch.ones(SHARE // 64, 64).t(), id="small"),
        pytest.param(torch.ones(64, 3 * SHARE // 64)[:, ::2], id="neither"),
    ],
)
def test_other_slices_are_summed_as_they_are(number, z, monkeypatch):
    shapes = taken(monkeypatch)
    assert torch.equal(sums(z), torch.full((64,), float(z.shape[1])))
    assert shapes == [tuple(z.shape)]


def test_infinite_numbers_stay_in_their_row(number):
    z = columns(64, number * SHARE // 64)
    z[3, 7], z[4, -1] = torch.nan, torch.inf
    for found in (sums(z), maxima(z)):
        assert found[3].isnan()
        assert found[4] == torch.inf
        assert found[[0, 1, 2, 5, 63]].isfinite().all()


@pytest.mark.parametrize("terms", [2, 3, 4, 5])
@pytest.mark.parametrize("in_columns", [True, False])
def test_products_of_shares(number, terms, in_columns):
    terms = terms * 600 + 12 * (terms == 5)
    a, b = columns(40, terms), torch.randn(terms, 24, generator=torch.Generator().manual_seed(1))
    a = a if in_columns else a.contiguous()
    total = torch.randn(40, 24, generator=torch.Generator().manual_seed(2))
    exact, plain = total.double() + a.double() @ b.double(), total + a @ b
    shares = shares_of(total, number * TERMS)
    assert shares is not None
    assert shares.shape == (number, 40, 24)
    add_product(a, b, shares)
    assert all(bool(share.any()) for share in shares) is (terms % number == 0)
    collect(shares, total)
    assert (total - exact).abs().max() <= 1.2 * (plain - exact).abs().max() + 1e-7 * exact.abs().max()


@pytest.mark.parametrize("number", [2], indirect=True)
def test_where_nothing_is_shared(number):
    usual = torch.zeros(TOKENS[0], 8)
    assert shares_of(usual, 2 * TERMS) is not usual
    assert shares_of(usual, 2 * TERMS - 1) is usual
    assert shares_of(None, 2 * TERMS) is None
    for other in (torch.zeros(TOKENS[0] - 1, 8), torch.zeros(TOKENS[-1] + 1, 8), usual.double()):
        assert shares_of(other, 2 * TERMS) is other
    for n in (1, 5):
        torch.set_num_threads(n)
        assert shares_of(usual, 8 * TERMS) is usual
    collect(usual, usual)
    assert not usual.any()


@pytest.mark.parametrize("number", [2], indirect=True)
@pytest.mark.parametrize("want", ["loss", "entropy"])
def test_gradients_are_float64s(number, want, monkeypatch):
    """In columns, and in rows: with 40 tokens at a time, and a last slice that has no even shares."""
    monkeypatch.setattr(threads, "SHARE", 256)
    monkeypatch.setattr(threads, "TERMS", 8)
    shared, usual = [], threads.shares_of

    def seen(total, terms):
        found = usual(total, terms)
        shared.append(found is not total)
        return found

    for name in ("backend", "weights"):
        monkeypatch.setattr(f"logitless.vocab.backends.eager.{name}.shares_of", seen)
    x = operands((80,), 8, 2151, dtype=torch.float32, bias=False).training("hidden", "weight")
    right = x.to(torch.float64)
    found = []
    for ops in (x, right):
        options = {"backend": "eager", "memory_budget": 1_500_000 * (1 if ops is x else 2)}
        if want == "loss":
            loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, **options)
        else:
            stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), **options)
            loss = (stats.entropy.sin() - stats.logprob).mean()
        loss.backward()
        found.append((loss.detach().double(), {name: leaf.grad for name, leaf in ops.leaves.items()}))
    assert any(shared)
    (loss, grads), (exact, exact_grads) = found
    torch.testing.assert_close(loss, exact, rtol=1e-6, atol=1e-6)
    for name, g in grads.items():
        assert_near_in_norm(g, exact_grads[name], 4e-6, name)


@pytest.mark.parametrize("number", [2, 4], indirect=True)
def test_memory_is_that_of_the_chunks_gradient(number):
    total = torch.zeros(TOKENS[0], 16)
    a, b = columns(TOKENS[0], 4 * TERMS), torch.ones(4 * TERMS, 16)
    with AllocationTracker() as tracker:
        shares = shares_of(total, 4 * TERMS)
        assert shares is not None
        add_product(a, b, shares)
        collect(shares, total)
    assert tracker.peak <= number * total.nbytes
