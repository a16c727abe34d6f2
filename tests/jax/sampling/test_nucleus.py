"""Which entries of a row the rules keep, found bit by bit, against torch's way and a sort."""

import math

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

from logitless.algebra.rules import Rules  # noqa: E402
from logitless.jax.sampling.nucleus import kept  # noqa: E402
from logitless.sample import rules as torch_rules  # noqa: E402

V = 3_001
RULES = [
    {"top_p": 0.9},
    {"top_k": 70, "top_p": 0.5},
    {"top_k": 10**20, "top_p": 0.3},
    {"top_k": 700, "top_p": 0.9, "min_p": 1e-2, "order": "vllm"},
    {"top_p": 0.999, "min_p": 1e-4},
    {"top_p": 0.9, "min_p": 1e-3, "order": "vllm"},
    {"top_p": 1e-9},
]


def rows() -> torch.Tensor:
    """Flat, peaked, with equal entries, all equal, with forbidden ones, with one entry alone."""
    x = torch.randn(6, V, dtype=torch.float64)
    x[1] *= 9
    x[2] = (4 * x[2]).round() / 2
    x[3] = 0.0
    x[4, torch.rand(V) < 0.9] = -math.inf
    x[5] = -math.inf
    x[5, 77] = 3.0
    return x - x.amax(1, keepdim=True)


@pytest.mark.parametrize(
    "rules", [pytest.param(r, marks=[pytest.mark.slow] * (i > 2), id=str(r)) for i, r in enumerate(RULES)]
)
def test_what_a_sort_gives(rules):
    check(rows(), Rules(**rules))


SMALL_RULES = [{"top_k": 3}, {"top_p": 0.5}, {"top_p": 0.6, "min_p": 0.2, "order": "vllm"}]


@pytest.mark.parametrize("v", [1, 8])
@pytest.mark.parametrize("rules", SMALL_RULES, ids=str)
def test_small_rows(rules, v):
    """Of as many entries as a power of two: random, equal, with equal ones, and with one that is possible."""
    x = torch.randn(4, v, dtype=torch.float64)
    x[1] = 0.0
    x[2] = x[2].round()
    x[2, -1] = x[2].max()  # the last of equal ones
    x[3, 1:] = -math.inf
    check(x - x.amax(1, keepdim=True), Rules(**rules))


def check(x: torch.Tensor, rules: Rules) -> None:
    """What is kept of each row is the start of its sorted entries, of equal ones the first."""
    total = x.logsumexp(1)
    with jax.enable_x64(True):
        run = jax.jit(jax.vmap(lambda x, total: kept(rules, x, total)))
        got = np.asarray(run(jnp.asarray(x.numpy()), jnp.asarray(total.numpy())))
    own = torch_rules.Rules(rules.top_k, rules.top_p, rules.min_p, rules.order)
    for row, lse, mask in zip(x, total, got, strict=True):
        values, order = row.sort(descending=True, stable=True)
        count = int(own.prefix(values[None], lse[None]))
        assert sorted(order[:count].tolist()) == np.flatnonzero(mask).tolist()
