"""verl's cases: fused log-probs with entropy, its policy losses under its aggregations, penalties and advantages."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless as ll
from tests.support.peers.outcomes import Operands, Within, assert_held, assert_same, cheapest, fit, outcome, seeded
from tests.support.peers.statistics import Statistics

# Its five models' vocabularies and widths.
MODELS = ((1937, 3584, 152064), (2169, 896, 151936), (1530, 2048, 32256), (1388, 4096, 102400), (8192, 4096, 102400))
FUSED = [
    Statistics(("logprob", "entropy"), *fit(*model), dtype, within, temperature, seed=seed)
    for model, (dtype, within), temperature, seed in product(
        (*MODELS, (64, 64, 1024)),
        ((torch.float32, Within(1e-2, 1e-4)), (torch.bfloat16, Within(2e-2, 4e-2))),
        (0.7, 1.0, 1.5),
        (0, 1),
    )
]


@pytest.mark.parametrize("case", cheapest(FUSED, lambda case: case.cost), ids=str)
def test_logprob_and_entropy(case):
    case.check()


@pytest.mark.calls_peer("verl", "ray", "liger_kernel")
@pytest.mark.parametrize("chunk_size", [3, 512])
@pytest.mark.parametrize("case", [case for case in FUSED if case.dtype == torch.float32], ids=str)
def test_its_fused_head(case, chunk_size):
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    fused = FusedLinearForPPO(chunk_size=chunk_size)

    def theirs(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, temperature: Tensor) -> Operands:
        logprob, entropy = fused(hidden, weight, labels, case.temperature)
        return {"logprob": logprob, "entropy": entropy}

    case.check_against(theirs)


def clipped(r: Tensor, a: Tensor, case: "Batch") -> Tensor:
    """PPO's pessimistic choice, and its second bound where the advantage is negative."""
    worse = torch.maximum(-a * r, -a * r.clamp(1 - case.low, 1 + case.high))
    return torch.where(a < 0, torch.minimum(worse, -a * case.dual), worse)


def geometric(logp: Tensor, old: Tensor, a: Tensor, mask: Tensor, case: "Batch") -> Tensor:
    d = logp - old
    d = torch.where(a > 0, d.clamp(max=case.high), d.clamp(min=-case.low))
    return (-a[:, 0] * ((d * mask).sum(-1) / mask.sum(-1)).exp()).mean()


def sequence_ratio(logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (((logp - old) * mask).sum(-1) / mask.sum(-1)).exp()


def soft_gate(r: Tensor, a: Tensor) -> Tensor:
    t = torch.where(a > 0, 1.0, 1.05)
    return -a * torch.sigmoid(t * (r - 1)) * 4 / t


# Per token, written from the papers: (log-prob, old, advantages, mask, case).
DENSE: dict[str, Callable[..., Tensor]] = {
    "vanilla": lambda p, old, a, m, c: clipped((p - old).exp(), a, c),
    "gpg": lambda p, old, a, m, c: -p * a,
    "cispo": lambda p, old, a, m, c: -(p - old).exp().clamp(1 - c.low, 1 + c.high).detach() * a * p,
    "dro": lambda p, old, a, m, c: -(p * a - 0.5 * 0.1 * (p - old) ** 2),
    "sapo": lambda p, old, a, m, c: soft_gate((p - old).exp(), a),
}
OURS: dict[str, Callable[..., Tensor]] = {
    "vanilla": lambda p, old, a, m, c: ll.losses.ppo_clip(p, old, a, c.low, c.high, delta=c.dual),
    "gpg": lambda p, old, a, m, c: ll.losses.reinforce(p, a),
    "cispo": lambda p, old, a, m, c: ll.losses.cispo(p, old, a, c.low, c.high),
    "dro": lambda p, old, a, m, c: ll.losses.reinforce(p, a) + 0.1 * ll.losses.kl_k2(p, old),
    "sapo": lambda p, old, a, m, c: ll.losses.sapo(p, old, a),
}
MEANS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
WHOLE = ("gspo", "geo_mean")  # losses of whole responses
CLIPS = ((0.2, 0.2, 3.0), (0.1, 0.3, 2.0), (0.4, 0.4, 1.5))


@dataclass(frozen=True)
class Batch:
    """A batch of log-probs with one of the losses, and how it is averaged."""

    loss: str
    mean: str
    rows: int
    length: int
    low: float
    high: float
    dual: float
    per_token: bool  # whether advantages differ within a response

    def __str__(self) -> str:
        return "-".join(str(x) for x in vars(self).values())

    def operands(self) -> Operands:
        generator, shape = seeded(), (self.rows, self.length)
        logp = -3 * torch.rand(shape, generator=generator)
        advantages = torch.randn(self.rows, self.length if self.per_token else 1, generator=generator)
        lengths = torch.randint(1, self.length + 1, (self.rows, 1), generator=generator)
        return {
            "logp": logp,
            "old": logp + 0.5 * torch.randn(shape, generator=generator),
            "advantages": advantages.expand(shape).contiguous(),
            "mask": (torch.arange(self.length) < lengths).float(),
        }

    def averaged(self, each: Tensor, mask: Tensor) -> Tensor:
        each, count = each * mask, mask.sum(-1)
        if self.mean == "token-mean":
            return each.sum() / mask.sum()
        if self.mean == "seq-mean-token-mean":
            return (each.sum(-1) / count).mean()
        return each.sum(-1).mean() / (self.length if self.mean.endswith("norm") else 1)

    def dense(self, logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        if self.loss == "geo_mean":
            return geometric(logp, old, advantages, mask, self)
        if self.loss == "gspo":
            r = sequence_ratio(logp, old, mask)
            a = advantages[:, 0]
            return torch.maximum(-a * r, -a * r.clamp(1 - self.low, 1 + self.high)).mean()
        return self.averaged(DENSE[self.loss](logp, old, advantages, mask, self), mask)

    def ours(self, logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        old = old.masked_fill(mask == 0, torch.inf)  # what lies under the mask may be anything
        if self.loss == "geo_mean":
            return ll.losses.gmpo(logp, old, advantages[:, 0], mask, clip=self.low).mean()
        if self.loss == "gspo":
            return ll.losses.gspo(logp, old, advantages[:, 0], mask, self.low, self.high).mean()
        each = OURS[self.loss](logp, old, advantages, mask, self)
        scheme, length = {
            "token-mean": ("token", None),
            "seq-mean-token-mean": ("sequence", None),
            "seq-mean-token-sum": ("constant", 1),
            "seq-mean-token-sum-norm": ("constant", self.length),
        }[self.mean]
        return ll.losses.batch_loss(each, mask, scheme, length)


BATCHES = [
    Batch(loss, mean, rows, length, *clip, per_token)
    for loss, mean, (rows, length), clip, per_token in product(
        DENSE, MEANS, ((4, 7), (8, 32), (3, 101)), CLIPS, (False, True)
    )
    if loss != "sapo" or mean == "seq-mean-token-mean"  # the only mean that its function has
] + [
    Batch(loss, "seq-mean-token-mean", rows, length, *clip, False)
    for loss, (rows, length), clip in product(WHOLE, ((4, 7), (8, 32), (3, 101)), CLIPS)
    if loss != "geo_mean" or clip[0] == clip[1]  # ours has one width for both sides
]
POLICY = Within(1e-5, 1e-4)


@pytest.mark.parametrize("case", cheapest(BATCHES, lambda case: case.rows * case.length, 3), ids=str)
def test_policy_loss(case):
    exact = outcome(case.dense, case.operands(), ("logp",), torch.float64)
    assert_held(outcome(case.ours, case.operands(), ("logp",)), exact, POLICY)


@pytest.mark.calls_peer("verl", "ray")
@pytest.mark.parametrize("case", BATCHES, ids=str)
def test_its_policy_loss(case):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=case.low,
        clip_ratio_low=case.low,
        clip_ratio_high=case.high,
        clip_ratio_c=case.dual,
        policy_loss=PolicyLossConfig(dro_beta=0.1),
    )
    loss = get_policy_loss_fn(case.loss)

    def theirs(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return loss(old, logp, advantages, mask, case.mean, config)[0]

    ours = outcome(case.ours, case.operands(), ("logp",))
    assert_same(ours, outcome(theirs, case.operands(), ("logp",)), POLICY)


PENALTIES = {"k1": ll.losses.kl_k1, "k2": ll.losses.kl_k2, "k3": ll.losses.kl_k3}
GAPS = (0.0, 1e-4, 0.1, 1.0, 2.0)  # its k3 is cut off at 10, far from any gap in training
PENALISED = list(product(PENALTIES, GAPS, (torch.float32, torch.float64)))


def penalised(gap: float, dtype: torch.dtype) -> Operands:
    logp = -3 * torch.rand(4, 9, generator=seeded(), dtype=torch.float64)
    return {"logp": logp.to(dtype), "ref": (logp + gap * torch.randn(4, 9, generator=seeded(1))).clamp(max=0).to(dtype)}


def schulman(name: str) -> Callable[..., Tensor]:
    def function(logp: Tensor, ref: Tensor) -> Tensor:
        d = ref - logp
        return {"k1": -d, "k2": d**2 / 2, "k3": torch.expm1(d) - d}[name]

    return function


@pytest.mark.parametrize(("name", "gap", "dtype"), PENALISED)
def test_penalty(name, gap, dtype):
    operands = penalised(gap, dtype)
    ours = outcome(lambda logp, ref: PENALTIES[name](logp, ref), operands, ("logp",))
    exact = outcome(schulman(name), operands, ("logp",), torch.float64)
    assert_held(ours, exact, Within(1e-5, 1e-4), 2e-5 if dtype == torch.float32 else 1e-9)


@pytest.mark.calls_peer("verl", "ray")
@pytest.mark.parametrize(("name", "gap", "dtype"), PENALISED)
def test_its_penalty(name, gap, dtype):
    from verl.trainer.ppo.core_algos import kl_penalty

    operands = penalised(gap, dtype)
    ours = outcome(lambda logp, ref: PENALTIES[name](logp, ref), operands, ("logp",))
    theirs = outcome(lambda logp, ref: kl_penalty(logp, ref, name), operands, ("logp",))
    assert_same(ours, theirs, Within(1e-5, 1e-4))


GROUPS = list(product(((64, 8), (16, 8), (5, 3), (10, 2), (7, 1)), (True, False), (0, 1, 2)))


@pytest.mark.parametrize(("shape", "scale", "seed"), GROUPS)
def test_group_advantages(shape, scale, seed):
    rewards = torch.randn(shape, generator=seeded(seed)) * 3 + 1
    exact = rewards.double() - rewards.double().mean(-1, keepdim=True)
    if scale and shape[1] > 1:
        exact = exact / (rewards.double().std(-1, keepdim=True) + 1e-6)
    found = ll.losses.group_advantages(rewards, scale=scale, epsilon=1e-6)
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=1e-5)


@pytest.mark.calls_peer("verl", "ray")
@pytest.mark.parametrize(("shape", "scale", "seed"), [given for given in GROUPS if given[0][1] > 1])
def test_its_group_advantages(shape, scale, seed):
    import numpy
    from verl.trainer.ppo import core_algos

    rewards = torch.randn(shape, generator=seeded(seed)) * 3 + 1
    mask = torch.ones(rewards.numel(), 4)
    index = numpy.arange(shape[0]).repeat(shape[1])
    token_rewards = torch.nn.functional.pad(rewards.reshape(-1, 1), (3, 0))
    options: dict[str, Any] = {"epsilon": 1e-6, "norm_adv_by_std_in_grpo": scale}
    found = ll.losses.group_advantages(rewards, scale=scale, epsilon=1e-6).reshape(-1, 1).expand(-1, 4)
    for name in ("compute_grpo_outcome_advantage", "compute_grpo_vectorized_outcome_advantage"):
        theirs, _ = getattr(core_algos, name)(token_rewards, mask, index, **options)
        torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-4)
