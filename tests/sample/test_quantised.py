"""Tokens of a quantised head: those of its dequantised weight under the same noise, and their record."""

from dataclasses import replace

import pytest
import torch

import logitless as ll
from logitless.errors import ConfigError
from logitless.relax import expected_embedding, gumbel_topk
from logitless.sample import Noise
from logitless.vocab.reference import dense_logits
from tests.support.vocab.comparing import assert_near_in_norm
from tests.support.vocab.quantised import stored_blocks
from tests.support.vocab.refusing import refused

RULES = {
    "none": {},
    "greedy": {"temperature": 0.0},
    "top_p far": {"top_p": 0.95, "temperature": 3.0},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
}


@pytest.mark.parametrize("budget", [None, 150_000])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_the_tokens_of_the_dense_head(rules, kind, budget):
    ops = stored_blocks(kind, 331, (17,), ranks=(2,), softcap=9.0)
    dense = ll.LMHead(ops.truth, ops.bias, adapters=ops.adapters, softcap=9.0)
    noise = Noise(torch.arange(17), torch.arange(17) * 3)
    got, expected = (
        ll.sample_tokens(ops.hidden, head, noise=noise, memory_budget=budget, **rules) for head in (ops.head, dense)
    )
    assert torch.equal(got.token, expected.token)
    assert torch.equal(got.topk_ids, expected.topk_ids)
    assert torch.equal(got.n_kept, expected.n_kept)
    for name in ("token_logit", "logsumexp", "mean_logit", "entropy", "logsumexp_at_temperature", "log_kept_mass"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_mean_embedding(tied):
    """Rows are dequantised a slice at a time, once for logits and mean."""
    ops = stored_blocks("Q8_0", 331, (9,), ranks=(2,), softcap=9.0)
    table = None if tied else torch.randn(331, 5, requires_grad=True)
    leaves = list(ops.leaves.values()) + ([] if tied else [table])
    found = expected_embedding(ops.hidden, ops.head, table, memory_budget=200_000)
    logp = dense_logits(ops.hidden, replace(ops.head, weight=ops.truth)).log_softmax(-1)
    mean = logp.exp() @ (ops.truth if tied else table).double()
    torch.testing.assert_close(found.embedding.double(), mean, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found.entropy.double(), -(logp.exp() * logp).sum(-1), rtol=2e-5, atol=2e-5)
    up = torch.randn_like(found.embedding)
    got = torch.autograd.grad(found.embedding, leaves, up)
    for one, other in zip(got, torch.autograd.grad(mean, leaves, up.double()), strict=True):
        assert_near_in_norm(one, other.double(), 4e-5)


def test_soft_tokens_are_refused():
    ops = stored_blocks("Q8_0", 50)
    refused(ConfigError, lambda: gumbel_topk(ops.hidden, ops.head, 0.7, k=4), "relax: expected a head", "dequantise")
