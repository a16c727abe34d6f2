"""prime-rl's cases: its fused head's log-probs and entropies, and the components of its losses, from their formulas.

No package index has prime-rl, so nothing here calls its functions.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless as ll
from tests.support.peers.outcomes import Operands, Within, assert_held, cheapest, outcome, seeded
from tests.support.peers.statistics import Statistics

FUSED = [
    Statistics(want, rows, width, vocab, dtype, Within(atol, rtol), temperature, own, trained=trained, seed=seed)
    for want, (rows, width, vocab), (dtype, atol, rtol), temperature, own, trained, seed in product(
        (("logprob",), ("logprob", "entropy")),
        ((8, 8, 37), (6, 4, 9), (32, 32, 50)),
        ((torch.float32, 1e-5, 1e-4), (torch.float16, 1e-4, 1e-2)),
        (1.0, 1.5, 1.7),
        (False, True),
        (("hidden", "weight"), ("hidden",), ()),
        (0, 1),
    )
]


@pytest.mark.parametrize("case", cheapest(FUSED, lambda case: case.cost, 2), ids=str)
def test_logprob_and_entropy(case):
    case.check()


@pytest.mark.parametrize("seed", range(4))
def test_shifted_labels(seed):
    """A token's log-prob stands at its own place once labels are shifted left and results right."""
    generator = seeded(seed)
    hidden, weight = torch.randn(2, 16, 32, generator=generator), torch.randn(50, 32, generator=generator)
    ids = torch.randint(50, (2, 16), generator=generator)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    found = ll.token_stats(hidden, ll.LMHead(weight), labels, temperature=1.5).logprob
    shifted = torch.nn.functional.pad(found[:, :-1], (1, 0))
    logits = (hidden.double() @ weight.double().T / 1.5)[:, :-1]
    exact = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert not shifted[:, 0].any()
    torch.testing.assert_close(shifted[:, 1:].double(), exact, atol=1e-5, rtol=1e-6)


# Per token, from log-probs: the trust region of the policy's component is in probabilities, not in their ratio.


def region(x: dict[str, Tensor], low: float, high: float) -> Tensor:
    moved = x["logp"].detach().exp() - x["old"].exp()
    return torch.where(x["advantages"] > 0, moved <= high, moved >= -low)


COMPONENTS: dict[str, tuple[Any, Any]] = {
    "ce": (lambda x: -x["logp"], lambda x: ll.losses.nll(x["logp"])),
    "rl": (
        lambda x: (
            -(region(x, 0.2, 0.2) * x["advantages"] * (x["logp"] - x["old"]).exp()) + 1e-3 * (x["logp"] - x["old"]) ** 2
        ),
        lambda x: (
            # no clip: an unbounded ratio, and what leaves the trust region weighs 0
            ll.losses.ppo_clip(x["logp"], x["old"], region(x, 0.2, 0.2) * x["advantages"], 1.0, 1e30)
            + 2e-3 * ll.losses.kl_k2(x["logp"], x["old"])
        ),
    ),
    "rl, wide": (
        lambda x: -(x["advantages"] * (x["logp"] - x["old"]).exp()) + 1e-3 * (x["logp"] - x["old"]) ** 2,
        lambda x: (
            ll.losses.ppo_clip(x["logp"], x["old"], x["advantages"], 1.0, 1e30)
            + 2e-3 * ll.losses.kl_k2(x["logp"], x["old"])
        ),
    ),
    "ipo": (
        lambda x: (
            -(((x["logp"].detach().exp() - x["old"].exp()).abs() <= 0.1) * x["advantages"])
            * (x["logp"] - x["old"]).exp()
            + 1e-3 * (x["logp"] - x["old"]) ** 2
        ),
        lambda x: (
            ll.losses.ppo_clip(
                *(x["logp"], x["old"]),
                ((x["logp"].detach().exp() - x["old"].exp()).abs() <= 0.1) * x["advantages"],
                *(1.0, 1e30),
            )
            + 2e-3 * ll.losses.kl_k2(x["logp"], x["old"])
        ),
    ),
    "ref_kl": (
        lambda x: (
            -((x["logp"].detach().exp() - x["old"].exp() >= -0.2) * (x["ref"] - x["logp"]).detach())
            * (x["logp"] - x["old"]).exp()
            + 1e-3 * (x["logp"] - x["old"]) ** 2
        ),
        lambda x: (
            ll.losses.ppo_clip(
                *(x["logp"], x["old"]),
                (x["logp"].detach().exp() - x["old"].exp() >= -0.2) * ll.losses.kl_k1(x["ref"], x["logp"].detach()),
                *(1.0, 1e30),
            )
            + 2e-3 * ll.losses.kl_k2(x["logp"], x["old"])
        ),
    ),
}
STREAMS = list(product(COMPONENTS, (6, 30, 50), (1.0, 0.1, 0.5), (1.0, 2.0, 8.0), (0, 1)))


def stream_operands(length: int, seed: int) -> Operands:
    """One packed sequence: its tokens, what sampled them, and which tokens a component has."""
    generator = seeded(seed)
    weight = torch.randn(37, 8, generator=generator) / 2
    hidden, labels = torch.randn(length, 8, generator=generator), torch.randint(37, (length,), generator=generator)
    logp = (hidden @ weight.T).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return {
        "hidden": hidden,
        "weight": weight,
        "labels": labels,
        "old": (logp + 0.5 * torch.randn(length, generator=generator)).clamp(max=-1e-3),
        "ref": (logp + torch.randn(length, generator=generator)).clamp(max=-1e-3),
        "advantages": torch.randn(length, generator=generator),
        "counted": torch.rand(length, generator=generator) > 0.3,
    }


def stream_dense(name: str, share: float, scale: float):
    def function(hidden: Tensor, weight: Tensor, labels: Tensor, counted: Tensor, **given: Tensor) -> Tensor:
        logp = (hidden @ weight.T).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        return (COMPONENTS[name][0]({"logp": logp, **given}) * share * counted).sum() / scale

    return function


def stream_ours(name: str, share: float, scale: float):
    """In one pass, with the component's weight of each token: tokens that it does not have are ignored."""

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, counted: Tensor, **given: Tensor) -> Tensor:
        def loss(stats: ll.TokenStats, shares: Tensor, *rest: Tensor) -> Tensor:
            return shares * COMPONENTS[name][1]({"logp": stats.logprob, **dict(zip(given, rest, strict=True))})

        ids, shares = labels.masked_fill(~counted, -100), torch.full(labels.shape, share / scale)
        inputs = (shares, *given.values())
        return ll.token_loss(loss, hidden, ll.LMHead(weight), ids, inputs=inputs, reduction="sum", memory_budget=2**20)

    return function


@pytest.mark.parametrize("given", cheapest(STREAMS, lambda given: given[1], 3))
def test_component(given):
    name, length, share, scale, seed = given
    operands = stream_operands(length, seed)
    exact = outcome(stream_dense(name, share, scale), operands, ("hidden", "weight"), torch.float64)
    ours = outcome(stream_ours(name, share, scale), operands, ("hidden", "weight"))
    assert_held(ours, exact, Within(1e-5, 1e-4), 1e-4)


@pytest.mark.parametrize("name", COMPONENTS)
def test_no_token_of_a_component(name):
    """A response cut off whole trains as nothing: a loss of 0, and gradients of 0."""
    operands = stream_operands(6, 0)
    operands["counted"] = torch.zeros(6, dtype=torch.bool)
    found = outcome(stream_ours(name, 1.0, 1.0), operands, ("hidden", "weight"))
    assert all(not x.any() for x in found.values())
