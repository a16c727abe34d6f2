"""Keyed Gumbel noise: Philox's published vectors, the same numbers whatever the slices, and Gumbel's distribution."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from logitless.errors import DtypeError, OptionError, ShapeError
from logitless.vocab import noise
from logitless.vocab.noise import Noise, gumbel, philox, reaching
from tests.support.allocations import trace_allocations
from tests.support.vocab.refusing import refused

SEEDS, POSITIONS = torch.tensor([3, -1, 2**62, 0]), torch.tensor([0, 5, 7, 2**40])
V = 1000


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    """The known answers of Random123, the library of Philox's authors."""

    def numbers(text: str) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(int(word, 16)) for word in text.split())

    assert philox(numbers(counter), numbers(key)) == numbers(words)


def test_the_same_numbers_whatever_the_slices():
    whole = gumbel(SEEDS, POSITIONS, slice(0, V))
    assert whole.shape == (4, V)
    assert whole.dtype == torch.float32
    cuts = [0, 1, 2, 7, 64, 130, 131, 999, V]
    parts = [gumbel(SEEDS, POSITIONS, slice(a, b)) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts, 1), whole)
    ids = torch.randint(V, (4, 37))
    assert torch.equal(gumbel(SEEDS, POSITIONS, ids), whole.gather(1, ids))
    assert torch.equal(gumbel(SEEDS, POSITIONS, ids[0]), whole[:, ids[0]])


def test_the_same_numbers_whatever_the_batch():
    whole = gumbel(SEEDS, POSITIONS, slice(0, V))
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(gumbel(SEEDS[order], POSITIONS[order], slice(0, V)), whole[order])
    for row in range(4):
        assert torch.equal(gumbel(SEEDS[row], POSITIONS[row], slice(0, V)), whole[row])
    shaped = gumbel(SEEDS.view(2, 2), POSITIONS.view(2, 2), slice(0, V))
    assert torch.equal(shaped, whole.view(2, 2, V))
    grid = gumbel(SEEDS[:, None], POSITIONS[None, :], slice(0, V))
    assert torch.equal(grid.diagonal().T, whole)


def test_every_bit_of_a_key_counts():
    ids = slice(0, 8)
    first = gumbel(torch.tensor(1), torch.tensor(1), ids)
    for bit in (0, 1, 31, 32, 33, 62):
        other = torch.tensor(1 ^ 2**bit)
        assert not torch.equal(gumbel(other, torch.tensor(1), ids), first)
        assert not torch.equal(gumbel(torch.tensor(1), other, ids), first)
    assert not torch.equal(gumbel(torch.tensor(-1), torch.tensor(1), ids), first)


@pytest.mark.parametrize("block", [8, 100, 4096])
def test_the_same_numbers_whatever_the_blocks(block, monkeypatch):
    expected = gumbel(SEEDS, POSITIONS, slice(3, V))
    monkeypatch.setitem(noise.BLOCK, "cpu", block)
    assert torch.equal(gumbel(SEEDS, POSITIONS, slice(3, V)), expected)


def test_both_tails_are_exact():
    """Against float64's own logarithms, from whichever end of (0, 1) is nearer."""
    words = torch.cat([torch.arange(50), 2**32 - 1 - torch.arange(50), torch.randint(2**32, (10_000,))])
    below, above = (words.double() + 0.5) / 2**32, (2**32 - words.double() - 0.5) / 2**32
    e = torch.where(below < 0.5, -below.log(), -torch.log1p(-above))
    expected = -e.log()
    got = noise._gumbel_of(words)
    assert got.isfinite().all()
    assert float(got.min()) == pytest.approx(-math.log(33 * math.log(2)))
    assert float(got.max()) == pytest.approx(33 * math.log(2))
    assert float(((got.double() - expected).abs() - 5e-9 - expected.abs() * 2**-24).max()) <= 0


def test_it_is_gumbel_noise():
    """Kolmogorov and Smirnov's largest distance, below what one sample in a hundred exceeds; mean and variance."""
    x = gumbel(torch.arange(4), torch.tensor(17), slice(0, 2**15)).flatten().double().sort().values
    n = x.numel()
    cdf = torch.exp(-torch.exp(-x))
    steps = torch.arange(n + 1) / n
    distance = float(torch.maximum((cdf - steps[:-1]).abs(), (cdf - steps[1:]).abs()).max())
    assert distance < 1.63 / n**0.5
    assert float(x.mean()) == pytest.approx(0.5772157, abs=4 * 1.2825 / n**0.5)
    assert float(x.var()) == pytest.approx(math.pi**2 / 6, abs=4 * 4 / n**0.5)


def test_keys_next_to_each_other_are_independent():
    """Rank correlations of neighbouring seeds, positions and ids, four standard deviations wide."""
    n = 2**15
    x = gumbel(torch.arange(2)[:, None] + 41, torch.arange(3)[None, :], slice(0, n + 4)).flatten(0, 1)
    uniform = torch.exp(-torch.exp(-x.double())) - 0.5
    rows = uniform[:, :n]
    between = torch.corrcoef(rows) - torch.eye(6)
    assert float(between.abs().max()) < 4 / n**0.5
    for lag in range(1, 5):
        within = (rows * uniform[:, lag : n + lag]).mean(1) * 12
        assert float(within.abs().max()) < 4 / n**0.5


def test_its_maximum_samples_the_softmax():
    """Frequencies of the best of logits plus noise over positions: chi-square with five degrees of freedom."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.5])
    n = 20_000
    best = (logits + gumbel(torch.tensor(9), torch.arange(n), slice(100, 106))).argmax(1)
    counts, expected = best.bincount(minlength=6).double(), logits.double().softmax(0) * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5  # one in a thousand


def test_kernels_get_words_of_64_bits():
    """They shift by 32 bits, which of an int32 means nothing on a GPU."""
    narrow = Noise(torch.tensor([3, -1], dtype=torch.int32), torch.tensor(5, dtype=torch.uint8)).expand((2,))
    assert [x.dtype for x in narrow] == [torch.int64, torch.int64]
    assert [x.tolist() for x in narrow] == [[3, -1], [5, 5]]


def test_drawn_noise_follows_the_generator():
    def draw(seed: int) -> Noise:
        return Noise.draw((5,), torch.device("cpu"), torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1).gumbel(slice(0, 9)), draw(1).gumbel(slice(0, 9)))
    assert not torch.equal(draw(1).seeds, draw(2).seeds)
    assert len(set(draw(1).seeds.tolist())) == 5


@pytest.mark.parametrize("block", [100, 2**16])
def test_what_reaches_a_bound(block, monkeypatch):
    """All that the noise itself says, at any bound, and hardly more."""
    monkeypatch.setitem(noise.BLOCK, "cpu", block)
    whole = gumbel(SEEDS, POSITIONS, slice(0, 20_003))
    largest = float(whole[2, 5:].max())
    for least in ([-4.0, 0.0, 2.0, 8.0], [largest] * 4, [25.0, math.inf, 1.0, -math.inf]):
        bound = torch.tensor(least)
        tokens, ids = reaching(SEEDS, POSITIONS, slice(5, 20_003), bound)
        found = torch.zeros_like(whole, dtype=torch.bool)
        found[tokens, ids] = True
        needed = whole >= bound[:, None]
        needed[:, :5] = False
        assert not (needed & ~found).any()
        assert tokens.numel() == found.sum()
        assert (found & ~needed).sum() < 100
    assert reaching(SEEDS, POSITIONS, slice(4, 4), bound)[0].shape == (0,)


@pytest.mark.parametrize("block", [100, 2**16])
@pytest.mark.parametrize("start", [5, 8, 3])
def test_what_reaches_a_bound_among_some(block, start, monkeypatch):
    """The same ids as without the restriction, those that are not among them left out; rows with none and with all."""
    monkeypatch.setitem(noise.BLOCK, "cpu", block)
    ids, bound = slice(start, 1_203), torch.tensor([-1.0, 0.5, 0.0, 2.0])
    among = torch.rand(4, 1_203 - start) < torch.tensor([0.1, 1.0, 0.0, 0.6])[:, None]
    tokens, where = reaching(SEEDS, POSITIONS, ids, bound)
    inside = among[tokens, where - start]
    pairs = set(zip(tokens[inside].tolist(), where[inside].tolist(), strict=True))
    found = list(zip(*(x.tolist() for x in reaching(SEEDS, POSITIONS, ids, bound, among)), strict=True))
    assert set(found) == pairs
    assert len(found) == len(pairs) > 100


def test_memory_is_the_result_and_a_block():
    traced = trace_allocations(lambda: gumbel(SEEDS, POSITIONS, slice(0, 2**18)))
    assert traced.kept == 4 * 4 * 2**18
    assert traced.peak <= traced.kept + noise.SCRATCH * noise.BLOCK["cpu"]
    ids = torch.arange(2**18)
    traced = trace_allocations(lambda: gumbel(SEEDS, POSITIONS, ids))
    assert traced.peak <= traced.kept + 2 * noise.SCRATCH * noise.BLOCK["cpu"]


def test_what_is_refused():
    everything = slice(0, 9)
    refused(DtypeError, lambda: gumbel(SEEDS.float(), POSITIONS, everything), "seeds as an integer", "float32")
    refused(DtypeError, lambda: gumbel(SEEDS, POSITIONS > 1, everything), "positions as an integer", "bool")
    refused(ShapeError, lambda: gumbel(SEEDS, POSITIONS[:3], everything), "one leading shape", "(4,), (3,)")
    refused(ShapeError, lambda: gumbel(SEEDS, POSITIONS, torch.zeros(3, 2)), "one leading shape", "(3,)")
    refused(ShapeError, lambda: Noise(SEEDS, POSITIONS).expand((3, 5)), "broadcast to (3, 5)", "(4,)")
    for ids in (slice(3), slice(0, None), slice(5, 2), slice(0, 9, 2), slice(-3, 2)):
        refused(OptionError, lambda ids=ids: gumbel(SEEDS, POSITIONS, ids), "slice(start, stop)", "got slice")
    assert gumbel(SEEDS, POSITIONS, slice(4, 4)).shape == (4, 0)
    assert gumbel(SEEDS[:0], POSITIONS[:0], everything).shape == (0, 9)
