"""flash-linear-attention's cases: fused cross-entropies, the KL to a frozen teacher, GRPO per token and per batch."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless as ll
from tests.support.peers.cross_entropy import CrossEntropy
from tests.support.peers.divergences import Divergence
from tests.support.peers.outcomes import (
    Operands,
    Within,
    assert_held,
    assert_same,
    cheapest,
    fit,
    ignored_rows_poisoned,
    outcome,
    seeded,
)

# It compares in norm: the error's root mean square is at most 1 % of the result's.
WITHIN = Within(1e-3, 1e-1)
VOCABULARIES, WIDTHS, LENGTHS = (32000, 100000), (1024, 2048), (512, 1024)
FLAGS = (False, True)
CROSS_ENTROPIES = [
    CrossEntropy(*fit(2 * length, width, vocab), dtype, WITHIN, reduction, bias, **options, ignored=0.1)
    for length, width, vocab, dtype, reduction, bias, options in product(
        LENGTHS,
        WIDTHS,
        VOCABULARIES,
        (torch.bfloat16, torch.float32),
        ("mean", "sum"),
        FLAGS,
        ({}, {"scale": 0.5}, {"softcap": 30.0}, {"label_smoothing": 0.1}),
    )
]


@pytest.mark.parametrize("case", cheapest(CROSS_ENTROPIES, lambda case: case.cost), ids=str)
def test_cross_entropy(case):
    case.check()


@pytest.mark.calls_peer("fla", "einops")
# Not its softcap: the tanh of its kernel is a device function, which the interpreter lacks.
@pytest.mark.parametrize("case", [c for c in CROSS_ENTROPIES if c.vocab == 32000 and not c.softcap], ids=str)
def test_its_fused_linear_cross_entropy(case):
    from fla.modules import FusedLinearCrossEntropyLoss

    loss = FusedLinearCrossEntropyLoss(
        logit_scale=case.scale,
        logit_softcapping=case.softcap,
        label_smoothing=case.label_smoothing,
        reduction=case.reduction,
    )

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, class_weight: Any) -> Tensor:
        return loss(hidden, labels, weight, bias)

    case.check_against(theirs)


DIVERGENCES = [
    Divergence(*fit(2 * length, width, vocab), dtype, WITHIN, beta=0, ignored=0.0)
    for length, width, vocab, dtype in product((16, 32), WIDTHS, VOCABULARIES, (torch.float32, torch.float16))
]


@pytest.mark.parametrize("case", cheapest(DIVERGENCES, lambda case: case.cost), ids=str)
def test_divergence(case):
    case.check()


@pytest.mark.calls_peer("fla", "einops")
@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("case", [case for case in DIVERGENCES if case.vocab == 32000], ids=str)
def test_its_divergence(case, in_fp32):
    from fla.modules import FusedKLDivLoss

    loss = FusedKLDivLoss(reduction="batchmean", accumulate_grad_in_fp32=in_fp32)

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        return loss(hidden, ref["ref_hidden"], weight, ref["ref_weight"])

    case.check_against(theirs)


GRPO = list(product((16, 1024, 4096), (32000, 65536), (torch.bfloat16, torch.float32), (0.0, 0.04, 0.2), (False, True)))


def grpo_operands(length: int, vocab: int, dtype: torch.dtype, masked: bool) -> Operands:
    generator = seeded()
    tokens, width, _ = fit(2 * length, 16, vocab)
    length = tokens // 2
    mask = torch.ones(2, length)
    if masked:
        mask[::2, length // 3 : max(length // 2, length // 3 + 1)] = 0
    return {
        "hidden": torch.randn(2, length, width, generator=generator).to(dtype),
        "weight": (torch.randn(vocab, width, generator=generator) / width**0.5).to(dtype),
        "labels": torch.randint(vocab - 1, (2, length), generator=generator),
        "mask": mask,
        "advantages": torch.randn(2, generator=generator),
        "ref": -torch.rand(2, length, generator=generator) - torch.tensor(float(vocab)).log(),
    }


def grpo_dense(beta: float):
    """One loss and one penalty per token; the policy is the one that sampled."""

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, advantages: Tensor, ref: Tensor):
        logp = (hidden @ weight.T).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        d = ref - logp
        kl = d.exp() - d - 1
        return {
            "loss": (beta * kl - (logp - logp.detach()).exp() * advantages[:, None]) * mask,
            "kl": kl.detach() * mask,
        }

    return function


def grpo_ours(beta: float):
    def function(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, advantages: Tensor, ref: Tensor):
        ids = labels.masked_fill(mask == 0, -100)
        hidden = ignored_rows_poisoned(hidden, mask == 0)
        logp = ll.token_stats(hidden, ll.LMHead(weight), ids, memory_budget=2**20).logprob
        kl = ll.losses.kl_k3(logp, ref)
        a = advantages[:, None].expand_as(logp)
        each = ll.losses.grpo(logp, logp.detach(), a, ref, beta=beta)
        return {"loss": torch.where(mask.bool(), each, 0), "kl": torch.where(mask.bool(), kl.detach(), 0)}

    return function


@pytest.mark.parametrize("given", cheapest(GRPO, lambda given: given[0] * given[1]))
def test_grpo(given):
    length, vocab, dtype, beta, masked = given
    operands = grpo_operands(length, vocab, dtype, masked)
    exact = outcome(grpo_dense(beta), operands, ("hidden", "weight"), torch.float64)
    ours = outcome(grpo_ours(beta), operands, ("hidden", "weight"))
    assert_held(ours, exact, WITHIN, 1e-4 if dtype == torch.float32 else None)


@pytest.mark.calls_peer("fla", "einops")
@pytest.mark.parametrize("given", [given for given in GRPO if given[2] == torch.float32])
def test_its_grpo(given, monkeypatch):
    from fla.modules.grpo import fused_grpo_loss
    from triton.runtime.autotuner import Autotuner

    # A launch's size is not timed where no device could say so: the first is taken.
    monkeypatch.setattr(Autotuner, "do_bench", lambda self, call, quantiles: [0.0] * len(quantiles))
    length, vocab, dtype, beta, masked = given
    operands = grpo_operands(length, vocab, dtype, masked)

    def theirs(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, advantages: Tensor, ref: Tensor):
        logits = torch.nn.functional.pad(hidden @ weight.T, (0, 0, 0, 1))  # its last token is left out
        loss, kl = fused_grpo_loss(logits, ref, labels, advantages, beta, mask.int(), save_kl=True)
        return {"loss": loss, "kl": kl.detach()}

    ours = outcome(grpo_ours(beta), operands, ("hidden", "weight"))
    assert_same(ours, outcome(theirs, operands, ("hidden", "weight")), Within(1e-3, 3e-3))


CASES = ("unclipped", "clipped", "kl", "masked")


def batch(case: str, dtype: torch.dtype) -> tuple[Operands, float]:
    """Four responses of five tokens with rewards of either sign."""
    logp = (torch.randn(4, 5, generator=seeded()) * 0.1).to(dtype)
    mask, ref, old, beta = torch.ones(4, 5, dtype=torch.bool), logp.clone(), logp.clone(), 0.0
    if case == "clipped":
        old = old + torch.tensor([[-0.5], [0.5], [-0.5], [0.5]], dtype=dtype)
    elif case == "kl":
        ref, beta = ref + 0.3, 0.2
    elif case == "masked":
        mask[0, 1:] = mask[2, 3:] = False
    return {"logp": logp, "ref": ref, "old": old, "mask": mask, "rewards": torch.tensor([1.5, -0.5, 2.0, -1.0])}, beta


def batch_dense(beta: float):
    def function(logp: Tensor, ref: Tensor, old: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
        a = ((rewards - rewards.mean()) / (rewards.std() + 1e-8))[:, None]
        r, d = (logp - old).exp(), ref - logp
        each = -torch.minimum(a * r, a * r.clamp(0.8, 1.2)) + beta * (d.exp() - d - 1)
        return (each * mask).sum() / mask.sum()

    return function


def batch_ours(beta: float):
    def function(logp: Tensor, ref: Tensor, old: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
        a = ll.losses.group_advantages(rewards[None], epsilon=1e-8)[0, :, None].expand_as(logp)
        each = ll.losses.grpo(logp.float(), old.float(), a.float(), ref.float(), clip=0.2, beta=beta)
        return ll.losses.batch_loss(each, mask, "token")

    return function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_batch(case, dtype):
    operands, beta = batch(case, dtype)
    exact = outcome(batch_dense(beta), operands, ("logp",), torch.float64)
    assert_held(
        outcome(batch_ours(beta), operands, ("logp",)), exact, Within(1e-5 if dtype == torch.float32 else 2e-2, 0)
    )


@pytest.mark.calls_peer("fla", "einops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_its_batch(case, dtype):
    from fla.modules.grpo import grpo_loss_with_old_logps

    operands, beta = batch(case, dtype)

    def theirs(logp: Tensor, ref: Tensor, old: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return grpo_loss_with_old_logps(logp, ref, old, mask, 5, rewards, beta, 0.2)

    ours = outcome(batch_ours(beta), operands, ("logp",))
    tolerance = Within(1e-5 if dtype == torch.float32 else 2e-2, 0)
    assert_same(ours, outcome(theirs, operands, ("logp",)), tolerance)
