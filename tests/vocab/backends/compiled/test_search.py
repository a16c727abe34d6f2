"""The compiled search for noise that can still win: the same tokens, from when it has paid for itself."""

import math
import warnings

import pytest
import torch

import logitless as ll
from logitless.vocab.backends.compiled import kernels, search
from logitless.vocab.noise import PLAIN, Noise
from tests.support.vocab.comparing import operands
from tests.support.vocab.processors import needs_a_compiler

pytestmark = pytest.mark.compiled


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No function is known yet, and nothing has been looked through."""
    monkeypatch.setattr(search, "_looked_through", 0)
    known = {}
    monkeypatch.setattr(kernels, "_compiled", known)
    return known


def noise_of(tokens):
    g = torch.Generator().manual_seed(7)
    seeds = torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=g)
    return Noise(seeds, torch.randint(2**40, (tokens,), generator=g))


@needs_a_compiler
@pytest.mark.parametrize("at_a_time", [64, 1 << 21])
def test_it_finds_what_plain_operations_find(at_a_time, fresh, monkeypatch):
    """Of any number of tokens and entries, from anywhere in a vocabulary, with none and with all of them reaching."""
    monkeypatch.setattr(search, "PAID", 0)
    monkeypatch.setattr(search, "AT_A_TIME", at_a_time)
    for tokens, ids in ((5, slice(3, 1_206)), (1, slice(0, 700)), (3, slice(2**34 - 9, 2**34 - 5)), (2, slice(1, 2))):
        noise = noise_of(tokens)
        among = torch.rand(tokens, ids.stop - ids.start) < 0.4
        for least in (-math.inf, -1.0, 3.0, 25.0):
            bound = torch.full((tokens,), least)
            for some in (None, among):
                found = noise.reaching(ids, bound, some, search.search_of(noise.seeds))
                usual = noise.reaching(ids, bound, some, PLAIN)
                assert sorted(zip(*map(torch.Tensor.tolist, found), strict=True)) == sorted(
                    zip(*map(torch.Tensor.tolist, usual), strict=True)
                )
    assert kernels.count() == len(fresh) == 1


@needs_a_compiler
def test_a_process_compiles_once_it_has_looked_through_enough(fresh, monkeypatch):
    monkeypatch.setattr(search, "PAID", 2_000)
    ops = operands((6,), 8, 1031, dtype=torch.float32)
    noise, counts, tokens = noise_of(6), [], []
    for _ in range(3):  # the best 64 of 1,031 entries are not looked for
        tokens.append(ll.sample_tokens(ops.hidden, ops.head, noise=noise).token)
        counts.append(kernels.count())
    assert counts == [0, 1, 1]
    assert search._looked_through == 6 * 1032
    assert all(torch.equal(t, tokens[0]) for t in tokens)
    assert list(fresh) == [next(key for key in fresh if key[0] == "search")]


def test_it_stays_plain_without_a_compiler_and_where_compiling_fails(fresh, monkeypatch):
    monkeypatch.setattr(search, "PAID", 0)
    noise, bound = noise_of(3), torch.zeros(3)
    usual = noise.reaching(slice(0, 500), bound, None, PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(search, "why_not", lambda device: "no compiler")
        found = noise.reaching(slice(0, 500), bound, None, search.search_of(noise.seeds))
    assert not fresh
    assert all(map(torch.equal, found, usual))

    def fail(*_):
        raise RuntimeError("no space left")

    monkeypatch.setattr(kernels, "build", fail)
    monkeypatch.setattr(search, "why_not", lambda device: None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = noise.reaching(slice(0, 500), bound, None, search.search_of(noise.seeds))
    assert "plain operations compute it (RuntimeError: no space left)" in str(said[0].message)
    assert all(map(torch.equal, found, usual))


def test_tensors_without_numbers_are_not_searched_by_it(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(search, "PAID", 0)
    assert search.search_of(torch.zeros(3, dtype=torch.int64, device="meta")) is PLAIN
    with FakeTensorMode():
        assert search.search_of(torch.zeros(3, dtype=torch.int64)).at_a_time == 0
