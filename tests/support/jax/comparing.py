"""Holding the JAX pass against the dense float64 oracle and against torch, on the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from logitless.jax import LMHead, token_stats
from tests.support.vocab.comparing import INTEGERS, Operands, cotangents_like, gradients


def array(x: Any) -> Any:
    """A tensor as a jax array of its dtype, where jax has it on."""
    return jnp.asarray(x.detach().numpy()) if isinstance(x, torch.Tensor) else x


def head_of(ops: Operands) -> LMHead:
    return LMHead(array(ops.weight), array(ops.bias), **ops.transform)


def reference_of(ops: Operands) -> tuple[Any, LMHead] | None:
    return None if ops.ref is None else (array(ops.ref.hidden), head_of(ops.ref))


def call(ops: Operands, want: tuple[str, ...], up: dict[str, Any], **options: Any) -> tuple[dict, dict, dict]:
    """(results, integer results, gradients by leaf for upstream gradients `up`), under jit."""
    options = {name: array(x) for name, x in options.items()}
    reference, labels = reference_of(ops), array(ops.labels)

    @jax.jit
    def both(hidden, head, up):
        def floats(hidden, head):
            found = vars(token_stats(hidden, head, labels, want=want, reference=reference, **options))
            whole = {name: x for name, x in found.items() if name in INTEGERS}
            return {name: x for name, x in found.items() if name not in INTEGERS}, whole

        out, pull, whole = jax.vjp(floats, hidden, head, has_aux=True)
        # of what has no gradient any cotangent adds nothing
        return out, whole, pull({name: up.get(name, jnp.ones_like(x)).astype(x.dtype) for name, x in out.items()})

    out, whole, (hidden, head) = both(array(ops.hidden), head_of(ops), {name: array(x) for name, x in up.items()})
    return out, whole, {"hidden": hidden, "weight": head.weight, "bias": head.bias}


def near(got: Any, expected: torch.Tensor, tolerance: float, name: str) -> None:
    """Elementwise |got - expected| ≤ tolerance·(1 + |expected|), infinities equal."""
    np.testing.assert_allclose(np.asarray(got), expected.detach().numpy(), tolerance, tolerance, err_msg=name)


def near_in_norm(got: Any, expected: torch.Tensor, tolerance: float, name: str) -> None:
    """|got - expected| ≤ tolerance·max|expected| everywhere."""
    limit = tolerance * float(expected.abs().max())
    np.testing.assert_allclose(np.asarray(got), expected.detach().numpy(), 0, limit, err_msg=name)


def compare(ops: Operands, expected: dict[str, torch.Tensor], tolerance: float, **options: Any) -> None:
    """The JAX pass gives `expected` (a graph over the leaves of `ops`) and its gradients under random cotangents."""
    want = tuple(name for name in expected if not name.startswith(("top_k_", "candidate_")))
    up = cotangents_like(expected)
    out, whole, grads = call(ops, want, up, **options)
    assert set(out) | set(whole) == set(expected)
    for name, x in expected.items():
        if name in INTEGERS:
            np.testing.assert_array_equal(whole[name], x.numpy(), err_msg=name)
        else:
            near(out[name], x, tolerance, name)
    for name, x in gradients(expected, ops.leaves, up).items():
        near_in_norm(grads[name], x, 2 * tolerance, f"d {name}")
