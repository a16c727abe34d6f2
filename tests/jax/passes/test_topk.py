"""Top-k of a slice by blocks, against `jax.lax.top_k`."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

from logitless.jax.passes.topk import top_k  # noqa: E402


@pytest.mark.parametrize(("v", "k"), [(5, 5), (1000, 3), (4096, 10), (5003, 64)])
def test_two_levels_are_lax_top_k(v, k):
    """Many equal entries: the same ids."""
    z = jax.random.randint(jax.random.key(v), (6, v), 0, 50).astype(jnp.float32)
    z = z.at[1].set(0.0).at[2].set(-jnp.inf).at[3, ::2].set(-jnp.inf)
    for got, want in zip(top_k(z, k), jax.lax.top_k(z, k), strict=True):
        np.testing.assert_array_equal(got, want)
