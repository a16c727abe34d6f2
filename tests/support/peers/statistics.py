"""Log-probs, entropies and what else a peer reads off each token's distribution, with gradients of all of them."""

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
class Statistics(Case):
    """A case: which statistics of which tokens."""

    want: tuple[str, ...]
    rows: int
    width: int
    vocab: int
    dtype: torch.dtype
    within: Within
    temperature: float = 1.0
    each_its_own: bool = False  # a temperature per token
    bias: bool = False
    softcap: float | None = None
    ignored: float = 0.0
    trained: tuple[str, ...] = ("hidden", "weight", "bias")
    spread: float = 2.0
    seed: int = 0

    @property
    def cost(self) -> int:
        return self.rows * self.width * self.vocab

    def operands(self) -> Operands:
        generator = seeded(self.seed)

        normal = normals(generator, self.dtype)
        labels = torch.randint(self.vocab, (self.rows,), generator=generator)
        labels[torch.randperm(self.rows, generator=generator)[: int(self.ignored * self.rows)]] = -100
        own = torch.rand(self.rows, generator=generator) + 0.5 if self.each_its_own else torch.ones(self.rows)
        return {
            "hidden": normal(self.rows, self.width),
            "weight": normal(self.vocab, self.width, by=self.spread / self.width**0.5),
            "bias": normal(self.vocab) if self.bias else None,
            "labels": labels,
            "temperature": own * self.temperature,
        }

    def poisoned(self) -> Operands:
        operands = self.operands()
        return {**operands, "hidden": ignored_rows_poisoned(operands["hidden"], operands["labels"] == -100)}

    def dense(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, temperature: Tensor) -> Outcome:
        z = torch.nn.functional.linear(hidden, weight, bias)
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        z = z / temperature[:, None]
        logp, keep = z.log_softmax(-1), labels != -100

        def at_label(x: Tensor) -> Tensor:
            return x.gather(-1, labels.clamp_min(0)[:, None])[:, 0]

        found = {
            "logprob": at_label(logp),
            "entropy": -(logp.exp() * logp).sum(-1),
            "logsumexp": z.logsumexp(-1),
            "label_logit": at_label(z),
            "sum_sq_prob": logp.exp().square().sum(-1),
        }
        return {name: found[name] * keep for name in self.want}

    def ours(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, temperature: Tensor) -> Outcome:
        head = ll.LMHead(weight, bias, softcap=self.softcap)
        stats = ll.token_stats(
            *(hidden, head, labels),
            want=self.want,
            temperature=temperature.float() if self.each_its_own else self.temperature,
            memory_budget=2**20,
        )
        return {name: getattr(stats, name) for name in self.want}

    def found(self) -> Outcome:
        return outcome(self.ours, self.poisoned(), self.trained)

    def check(self) -> None:
        assert_held(self.found(), outcome(self.dense, self.operands(), self.trained, torch.float64), self.within)

    def check_against(self, function: Any) -> None:
        assert_same(self.found(), outcome(function, self.operands(), self.trained), self.within)
