"""The noise of `logitless.jax`: torch's words, bit for bit, and its Gumbel numbers."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

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


@pytest.mark.parametrize("first", [0, 77])
def test_noise_is_torchs(first):
    seeds, positions = np.array([3, -1, 2**62, 0]), np.array([0, 5, 7, 2**40])
    keys = Noise(seeds, positions).expand((4,))
    want = torch_noise.gumbel(torch.tensor(seeds), torch.tensor(positions), slice(first, first + 901)).numpy()
    run, each = (jax.jit(f) for f in (lambda k, i: k.gumbel_from(i, 901), lambda k, ids: k.gumbel(ids)))
    np.testing.assert_allclose(run(keys, first), want, 1e-6, 1e-6)
    np.testing.assert_allclose(each(keys, jnp.arange(first, first + 901)), want, 1e-6, 1e-6)


def test_noise_at_both_ends():
    words = np.concatenate([np.arange(50), 2**32 - 1 - np.arange(50), 2**31 - 25 + np.arange(50)]).astype(np.int64)
    want = torch_noise._gumbel_of(torch.tensor(words)).numpy()
    np.testing.assert_allclose(_gumbel_of(jnp.asarray(words.astype(np.uint32))), want, 1e-6, 1e-6)
