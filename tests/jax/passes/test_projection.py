"""Matrix products of fp32 operands are fp32's on a GPU and a TPU, too."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

from logitless.jax import LMHead, Noise, linear_cross_entropy, sample_tokens  # noqa: E402

HIDDEN, HEAD = jnp.ones((4, 3)), LMHead(jnp.ones((7, 3)))


def loss(hidden, head):
    return linear_cross_entropy(hidden, head, jnp.arange(4))


@pytest.mark.parametrize(
    "run",
    [jax.value_and_grad(loss, argnums=(0, 1)), lambda hidden, head: sample_tokens(hidden, head, Noise(1, 0), keep=2)],
    ids=["loss", "sample"],
)
def test_products_of_fp32_operands(run):
    """In full, unless jax's own option says otherwise."""

    def products():
        lines = jax.jit(run).lower(HIDDEN, HEAD).as_text().splitlines()
        return [line for line in lines if "dot_general" in line]

    assert products()
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products())
    with jax.default_matmul_precision("default"):
        assert not any("HIGHEST" in line for line in products())
