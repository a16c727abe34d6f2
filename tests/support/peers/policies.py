"""Policy-gradient losses of whole batches: from hidden states to one number, in every variant that peers have."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import logitless as ll

from .outcomes import (
    Case,
    Operands,
    Outcome,
    Within,
    assert_held,
    assert_same,
    ignored_rows_poisoned,
    normals,
    outcome,
    seeded,
)

SCHEMES = {"grpo": "sequence", "sapo": "sequence", "dr_grpo": "constant"}  # the others count tokens alike
CLIPPED = ("bnpo", "grpo", "dr_grpo", "dapo")


@dataclass(frozen=True)
class Policy(Case):
    """A case: a batch of responses, the loss and its options."""

    loss: str
    rows: int
    length: int
    width: int
    vocab: int
    dtype: torch.dtype
    within: Within
    bias: bool = False
    level: str = "token"
    beta: float = 0.0
    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    temperature: float = 1.0
    old: bool = True  # the tokens' log-probs when they were sampled; without, the policy's own
    reference: bool = False
    sampler: bool = False  # the importance ratio between the sampler's engine and the trainer
    corrected_kl: bool = False  # the penalty, times the importance ratio
    items: float | None = None  # what divides the sum, where it is not the number of tokens

    @property
    def cost(self) -> int:
        return self.rows * self.length * self.width * self.vocab

    def operands(self) -> Operands:
        generator = seeded()
        shape = (self.rows, self.length)

        normal = normals(generator, torch.float32)
        labels = torch.randint(self.vocab, shape, generator=generator)
        mask = torch.ones(shape)
        mask[:, self.length - self.length // 6 :] = 0.0
        mask[0, self.length // 2 :] = 0.0
        advantages = normal(self.rows)
        advantages[0] = -advantages[0].abs()
        logp = -torch.rand(shape, generator=generator) * 2 - torch.tensor(float(self.vocab)).log()
        operands = {
            "hidden": normal(*shape, self.width).to(self.dtype),
            "weight": normal(self.vocab, self.width, by=1 / self.width**0.5).to(self.dtype),
            "bias": normal(self.vocab).to(self.dtype) if self.bias else None,
            "labels": labels,
            "mask": mask,
            "advantages": advantages,
            "old": logp + normal(*shape, by=0.3) if self.old else None,
            "ref": logp + normal(*shape, by=0.3) if self.reference else None,
            "ratio": torch.rand(shape, generator=generator) * 0.999 + 0.001 if self.sampler else None,
        }
        return operands

    def poisoned(self) -> Operands:
        """NaN in the hidden states of tokens that do not count, and infinity in their old and reference log-probs."""
        operands = self.operands()
        ignored = operands["mask"] == 0
        anything = {
            name: operands[name].masked_fill(ignored, torch.inf)
            for name in ("old", "ref")
            if operands[name] is not None
        }
        return {**operands, "hidden": ignored_rows_poisoned(operands["hidden"], ignored), **anything}

    def dense(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **given: Any) -> Tensor:
        z = torch.nn.functional.linear(hidden, weight, bias) / self.temperature
        logp = z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        return self.from_logp(logp, **given)

    def from_logp(
        self, logp: Tensor, mask: Tensor, advantages: Tensor, old: Any = None, ref: Any = None, ratio: Any = None
    ) -> Tensor:
        """The batch's loss, written from the papers' formulas."""
        a, old = advantages[:, None], logp.detach() if old is None else old
        count = mask.sum(-1, keepdim=True)
        log_r = logp - old
        if self.level == "sequence":
            log_r = (log_r * mask).sum(-1, keepdim=True) / count.clamp_min(1)
        r = log_r.exp()
        if self.loss == "cispo":
            each = -r.clamp(max=self.high).detach() * a * logp
        elif self.loss == "sapo":
            t = torch.where(a > 0, 1.0, 1.05)
            each = -a * torch.sigmoid(t * (r - 1)) * 4 / t
        elif self.loss == "vespo":
            each = -_vespo(logp - old, mask, advantages, ratio) * a * logp
        else:
            first = r if self.delta is None else r.clamp(max=self.delta)
            each = -torch.minimum(a * first, a * r.clamp(1 - self.low, 1 + self.high))
        if ratio is not None and self.loss != "vespo":
            each = each * ratio
        if self.beta:
            d = (logp.detach() if ref is None else ref) - logp
            each = each + self.beta * (d.exp() - d - 1) * (r if self.corrected_kl else 1.0)
        each = each.expand_as(mask) * mask
        if self.items is not None:
            return each.sum() / self.items
        if self.loss in ("grpo", "sapo"):
            return (each.sum(-1) / count[:, 0].clamp_min(1)).mean()
        if self.loss == "dr_grpo":
            return each.sum() / mask.numel()
        if self.loss == "luspo":  # by hand: no loss of the library's
            return each.sum() / mask.shape[0]
        return each.sum() / mask.sum()

    def ours(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **given: Any) -> Tensor:
        ids = labels.masked_fill(given["mask"] == 0, -100)
        options: dict[str, Any] = {"temperature": self.temperature, "memory_budget": 2**20}
        return self.ours_from_logp(ll.token_stats(hidden, ll.LMHead(weight, bias), ids, **options).logprob, **given)

    def ours_from_logp(
        self, logp: Tensor, mask: Tensor, advantages: Tensor, old: Any = None, ref: Any = None, ratio: Any = None
    ) -> Tensor:
        """The same on `losses`, where the old log-probs of tokens that do not count may be anything."""
        old = logp.detach() if old is None else old.to(logp.dtype)
        a = advantages[:, None].expand_as(logp).to(logp.dtype)
        each = self._surrogate(logp, old, a, mask, ratio)
        if ratio is not None and self.loss != "vespo":
            each = each * ratio
        if self.beta:
            penalty = ll.losses.kl_k3(logp, logp.detach() if ref is None else ref.to(logp.dtype))
            if self.corrected_kl:
                penalty = penalty * self._ratio(logp, old, mask)
            each = each + self.beta * penalty
        if self.items is not None:
            return torch.where(mask.bool(), each, 0.0).sum() / self.items
        if self.loss == "luspo":
            return torch.where(mask.bool(), each, 0.0).sum() / mask.shape[0]
        return ll.losses.batch_loss(each, mask, SCHEMES.get(self.loss, "token"), self.length)

    def _ratio(self, logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        gap = torch.where(mask.bool(), logp - old, 0.0)
        return gap.exp() if self.level == "token" else ll.losses.sequence_logprob(gap, mask, True).exp()[:, None]

    def _surrogate(self, logp: Tensor, old: Tensor, a: Tensor, mask: Tensor, ratio: Any) -> Tensor:
        if self.loss == "cispo":
            return ll.losses.cispo(logp, old, a, epsilon_high=self.high)
        if self.loss == "sapo":
            return ll.losses.sapo(logp, old, a)
        if self.loss == "vespo":  # a weight held constant, on any statistic
            weight = _vespo(torch.where(mask.bool(), logp - old, 0.0).detach(), mask, a[:, 0], ratio)
            return ll.losses.reinforce(logp, weight * a)
        if self.level == "token":
            return ll.losses.ppo_clip(logp, old, a, self.low, self.high, self.delta)
        if self.delta is None:
            each = ll.losses.gspo(logp, old, a[:, 0], mask, self.low, self.high)
        else:
            gap = torch.where(mask.bool(), logp - old, 0.0)
            mean = ll.losses.sequence_logprob(gap, mask, average=True)
            each = ll.losses.ppo_clip(mean, torch.zeros_like(mean), a[:, 0], self.low, self.high, self.delta)
        return each[:, None].expand_as(logp)

    def check(self) -> None:
        exact = outcome(self.dense, self.operands(), ("hidden", "weight", "bias"), torch.float64)
        budget = 1e-4 if self.dtype == torch.float32 else None  # log-probs through an exponential
        assert_held(self.found(), exact, self.within, budget)

    def found(self) -> Outcome:
        return outcome(self.ours, self.poisoned(), ("hidden", "weight", "bias"))

    def check_against(self, function: Any) -> None:
        theirs = outcome(function, self.operands(), ("hidden", "weight", "bias"))
        assert_same(self.found(), theirs, self.within)


def _vespo(log_r: Tensor, mask: Tensor, advantages: Tensor, ratio: Any) -> Tensor:
    """VESPO's weight of a response, (B, 1): e^λ·w^k·e^(-λw) of its importance w, held constant."""
    total = (log_r.detach().clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if ratio is not None:
        total = total + ratio.log().clamp(-18.420680743952367, 20).sum(-1, keepdim=True)
    log_w = total.clamp(-18.420680743952367, 20)
    up = advantages[:, None] >= 0
    k, rate = torch.where(up, 2.0, 3.0), torch.where(up, 3.0, 2.0)
    return (rate + k * log_w - rate * log_w.exp()).exp()
