"""Distillation: a student's head against a teacher's, in the directions and mixtures that peers' tests have."""

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


@dataclass(frozen=True)
class Divergence(Case):
    """A case; beta is the teacher's weight in the mixture: 0 is KL(teacher‖student), 1 is KL(student‖teacher)."""

    rows: int
    width: int
    vocab: int
    dtype: torch.dtype
    within: Within
    beta: float = 0.5
    temperature: float = 1.0
    bias: bool = False
    ignore_index: int = -100
    ignored: float = 0.25
    hard: float = 0.0  # the weight of the labels' cross-entropy, at a temperature of 1
    soft: float = 1.0
    reduction: str = "mean"

    @property
    def cost(self) -> int:
        return self.rows * self.width * self.vocab

    def operands(self) -> Operands:
        generator = seeded()

        normal = normals(generator, self.dtype)
        labels = torch.randint(self.vocab, (self.rows,), generator=generator)
        labels[torch.randperm(self.rows, generator=generator)[: int(self.ignored * self.rows)]] = self.ignore_index
        return {
            "hidden": normal(self.rows, self.width),
            "weight": normal(self.vocab, self.width, by=2 / self.width**0.5),
            "bias": normal(self.vocab) if self.bias else None,
            "labels": labels,
            "ref_hidden": normal(self.rows, self.width),
            "ref_weight": normal(self.vocab, self.width, by=2 / self.width**0.5),
            "ref_bias": normal(self.vocab) if self.bias else None,
        }

    def poisoned(self) -> Operands:
        operands = self.operands()
        ignored = operands["labels"] == self.ignore_index
        both = {name: ignored_rows_poisoned(operands[name], ignored) for name in ("hidden", "ref_hidden")}
        return {**operands, **both}

    def _reduced(self, each: Tensor, count: Tensor) -> Tensor:
        return each.sum() / (count.clamp_min(1) if self.reduction == "mean" else 1)

    def dense(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        keep = labels != self.ignore_index
        z = torch.nn.functional.linear(hidden, weight, bias)[keep]
        z_ref = torch.nn.functional.linear(ref["ref_hidden"], ref["ref_weight"], ref["ref_bias"])[keep]
        s = (z / self.temperature).log_softmax(-1)
        t = (z_ref / self.temperature).log_softmax(-1).detach()
        if self.beta == 0:
            each = (t.exp() * (t - s)).sum(-1)
        elif self.beta == 1:
            each = (s.exp() * (s - t)).sum(-1)
        else:
            m = ((1 - self.beta) * s.exp() + self.beta * t.exp()).log()
            each = self.beta * (t.exp() * (t - m)).sum(-1) + (1 - self.beta) * (s.exp() * (s - m)).sum(-1)
        hard = -z.log_softmax(-1).gather(-1, labels[keep][:, None])[:, 0]
        return self._reduced(self.soft * each + self.hard * hard, keep.sum())

    def ours(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        name = {0: "reverse_kl", 1: "kl"}.get(self.beta, "jsd")
        head = ll.LMHead(weight, bias)
        stats = ll.token_stats(
            *(hidden, head, labels),
            want=(name,),
            reference=(ref["ref_hidden"], ll.LMHead(ref["ref_weight"], ref["ref_bias"])),
            **({"jsd_beta": self.beta} if name == "jsd" else {}),
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            memory_budget=2**20,
        )
        total = self.soft * getattr(stats, name).sum()
        if self.hard:
            options: dict[str, Any] = {"reduction": "sum", "ignore_index": self.ignore_index}
            total = total + self.hard * ll.linear_cross_entropy(hidden, head, labels, **options)
        return self._reduced(total, (labels != self.ignore_index).sum())

    def found(self) -> Outcome:
        return outcome(self.ours, self.poisoned(), ("hidden", "weight", "bias"))

    def check(self) -> None:
        exact = outcome(self.dense, self.operands(), ("hidden", "weight", "bias"), torch.float64)
        budget = 1e-4 if self.dtype == torch.float32 else None  # differences of log-probs
        assert_held(self.found(), exact, self.within, budget)

    def check_against(self, function: Any) -> None:
        theirs = outcome(function, self.operands(), ("hidden", "weight", "bias"))
        assert_same(self.found(), theirs, self.within)
