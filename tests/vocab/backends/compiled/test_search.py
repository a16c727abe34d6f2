"""The library's search for noise that can still win: the same tokens, from when it is there or pays for itself."""

import math
from pathlib import Path

import pytest
import torch

import logitless as ll
from logitless.vocab.backends.compiled import library, search
from logitless.vocab.noise import PLAIN, WORD, Noise, blocks_reaching
from tests.support.vocab.comparing import operands
from tests.support.vocab.processors import needs_library


@pytest.fixture
def made(monkeypatch):
    """Whether the library is said to be on the disk, and how often it was used; nothing has been looked through."""
    calls = {"is made": False, "searches": 0}
    by_library = search._by_library

    def counted(*given):
        calls["searches"] += 1
        return by_library(*given)

    monkeypatch.setattr(search, "_looked_through", 0)
    monkeypatch.setattr(search, "_at_hand", False)
    monkeypatch.setattr(search, "_by_library", counted)
    monkeypatch.setattr(library, "is_made", lambda: calls["is made"])
    return calls


def noise_of(tokens):
    g = torch.Generator().manual_seed(7)
    seeds = torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=g)
    return Noise(seeds, torch.randint(-(2**40), 2**40, (tokens,), generator=g))


@needs_library
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", dict.fromkeys(("AVX2", torch.backends.cpu.get_cpu_capability())))
@pytest.mark.parametrize("first", [0, 2**32 - 9_001])
@pytest.mark.parametrize("count", [1, 7, 8, 4_096, 9_001])
def test_blocks_that_reach_are_those_of_plain_operations(count, first, kind, threads, monkeypatch):
    """At both ends of a word, beyond them, and where one word of thousands reaches."""
    vectors = library._library("g++", kind, ())
    monkeypatch.setattr(library, "library", lambda: vectors)
    noise, blocks = noise_of(3), torch.arange(first, first + count)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for least in (-1, 0, 1, WORD >> 1, WORD - (1 << 20), WORD, WORD + 1):
            words = torch.tensor([least, WORD - (1 << 19), least])
            assert torch.equal(search._by_library(*noise, blocks, words), blocks_reaching(*noise, blocks, words))
    finally:
        torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize("at_a_time", [64, 1 << 22])
def test_it_finds_what_plain_operations_find(at_a_time, made, monkeypatch):
    """Of any number of tokens and entries, from anywhere in a vocabulary, with none and with all of them reaching."""
    made["is made"] = True
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
    assert made["searches"]


@needs_library
def test_a_process_takes_the_library_where_it_is_made_or_there_was_enough_to_look_through(made, monkeypatch):
    monkeypatch.setattr(search, "PAID", 2_000)
    ops = operands((6,), 8, 1031, dtype=torch.float32)
    noise, tokens = noise_of(6), []
    for is_made, searches in ((False, 0), (False, 1), (True, 2)):  # the best 64 of 1,031 entries are not looked for
        made["is made"] = is_made
        tokens.append(ll.sample_tokens(ops.hidden, ops.head, noise=noise).token)
        assert made["searches"] == searches
    assert search._looked_through == 6 * 1032
    for name, before in (("_looked_through", 0), ("_at_hand", False)):
        monkeypatch.setattr(search, name, before)
    tokens.append(ll.sample_tokens(ops.hidden, ops.head, noise=noise).token)
    assert made["searches"] == 3
    assert all(torch.equal(t, tokens[0]) for t in tokens)


def test_it_stays_plain_without_a_compiler_and_without_a_library(made, monkeypatch):
    monkeypatch.setattr(search, "PAID", 0)
    noise, bound = noise_of(3), torch.zeros(3)
    usual = noise.reaching(slice(0, 500), bound, None, PLAIN)
    for name, patched in (("why_not", lambda device: "no compiler"), ("library", lambda: None)):
        with monkeypatch.context() as patch:
            patch.setattr(library if name == "library" else search, name, patched)
            found = noise.reaching(slice(0, 500), bound, None, search.search_of(noise.seeds))
        assert made["searches"] == 0
        assert all(map(torch.equal, found, usual))


@needs_library
def test_a_library_is_made_once_there_is_one_and_never_where_no_folder_can_be(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert not library.is_made()
    made = library._loaded(library._command("g++", torch.backends.cpu.get_cpu_capability(), library._more()))
    assert made.place.parent == Path(tmp_path, "cache", "logitless")
    monkeypatch.setenv("CXX", "g++")
    assert library.is_made()
    for other in ("another-compiler", 'g++ "'):
        monkeypatch.setenv("CXX", other)
        assert not library.is_made()
    Path(tmp_path, "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert not library.is_made()


def test_tensors_without_numbers_are_not_searched_by_it(made, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(search, "PAID", 0)
    assert search.search_of(torch.zeros(3, dtype=torch.int64, device="meta")) is PLAIN
    with FakeTensorMode():
        assert search.search_of(torch.zeros(3, dtype=torch.int64)).at_a_time == 0
