"""The noise of `logitless.jax`: torch's words, bit for bit, and its Gumbel numbers."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

from logitless.errors import DtypeError, OptionError  # noqa: E402
from logitless.jax import Noise  # noqa: E402
from logitless.jax.sampling.noise import _gumbel_of, philox  # noqa: E402
from logitless.vocab import noise as torch_noise  # noqa: E402


def test_the_words_are_torchs():
    low, high, first, second = (torch.randint(2**32, (50,)) for _ in range(4))
    ids = torch.randint(2**34, (50,)) >> 2
    seeds, positions = low + (high << 32), first + (second << 32)
    want = torch_noise.words_of(seeds, positions, ids)
    words = [jnp.asarray(x.numpy().astype(np.uint32)) for x in (ids, first, second, 0 * low, low, high)]
    got = jax.jit(lambda a, b, c, d, k, l: philox((a, b, c, d), (k, l)))(*words)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


@pytest.mark.parametrize(("first", "width"), [(0, 901), (77, 900), (79, 3)])  # from and to within blocks of four
def test_noise_is_torchs(first, width):
    seeds, positions = np.array([3, -1, 2**62, 0]), np.array([0, 5, 7, 2**40])
    keys = Noise(seeds, positions).expand((4,))
    want = torch_noise.gumbel(torch.tensor(seeds), torch.tensor(positions), slice(first, first + width)).numpy()
    run, each = (jax.jit(f) for f in (lambda k, i: k.gumbel_from(i, width), lambda k, ids: k.gumbel(ids)))
    np.testing.assert_allclose(run(keys, first), want, 1e-6, 1e-6)
    np.testing.assert_allclose(each(keys, jnp.arange(first, first + width)), want, 1e-6, 1e-6)


def test_noise_at_both_ends():
    words = np.concatenate([np.arange(50), 2**32 - 1 - np.arange(50), 2**31 - 25 + np.arange(50)]).astype(np.int64)
    want = torch_noise._gumbel_of(torch.tensor(words)).numpy()
    np.testing.assert_allclose(_gumbel_of(jnp.asarray(words.astype(np.uint32))), want, 1e-6, 1e-6)


SEEDS = {
    "whole numbers": -1,
    "the lowest": -(2**63),
    "the highest": 2**64 - 1,
    "past 32 bits": 2**40 + 3,
    "int8": np.int8(-3),
    "uint8": np.uint8(200),
    "int32": jnp.asarray(-5, jnp.int32),
    "int64": np.int64(-(2**40)),
    "uint64": np.uint64(2**63 + 7),
}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_of_every_kind_are_as_in_twos_complement(name):
    seed = SEEDS[name]
    keys = Noise(seed, 2**33 + 1).expand((2,))
    words = [int(seed) % 2**32, int(seed) % 2**64 >> 32, 1, 2]
    np.testing.assert_array_equal(np.stack(keys), np.array([[w, w] for w in words], np.uint32))


def test_upper_words_that_are_given():
    keys = Noise(jnp.asarray([-7, 5], jnp.int32), 3, jnp.asarray([8, 9], jnp.uint32)).expand((2,))
    np.testing.assert_array_equal(keys.low, np.array([2**32 - 7, 5], np.uint32))
    np.testing.assert_array_equal(keys.high, [8, 9])
    np.testing.assert_array_equal(keys.position, [3, 3])
    np.testing.assert_array_equal(keys.position_high, [0, 0])


def test_a_key_gives_each_token_a_seed_of_its_own():
    first, again, other = (Noise.draw(jax.random.key(i), (40,)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first.seeds, again.seeds)
    for drawn in (first.seeds, first.high):
        assert len(set(np.asarray(drawn).tolist())) == 40  # but for one in five million
    assert not set(np.asarray(first.seeds).tolist()) & set(np.asarray(other.seeds).tolist())
    assert not (np.asarray(first.seeds) == np.asarray(first.high)).any()
    assert not np.asarray(first.positions).any()


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_that_64_bits_do_not_hold(seed):
    with pytest.raises(OptionError, match=f"expected seeds of 64 bits, got {seed}"):
        Noise(seed, 0).expand(())


@pytest.mark.parametrize("seed", [1.5, True, np.float32(1)])
def test_seeds_that_are_no_integers(seed):
    with pytest.raises(DtypeError, match="expected seeds as integers"):
        Noise(seed, 0).expand(())
