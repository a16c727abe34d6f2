"""Cross-entropy behind a linear head, with every option that a peer's tests give it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import logitless as ll

from .outcomes import (
    Case,
    Operands,
    Outcome,
    Within,
    assert_held,
    assert_same,
    assert_same_or_nearer,
    ignored_rows_poisoned,
    normals,
    outcome,
    seeded,
)

TRAINED = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class CrossEntropy(Case):
    """A case: what its tensors are like, and the options of the loss."""

    rows: int
    width: int
    vocab: int
    dtype: torch.dtype
    within: Within
    reduction: str = "mean"
    bias: bool = False
    class_weight: bool = False
    ignore_index: int = -100
    ignored: float = 0.25  # the share of the rows
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    temperature: float = 1.0
    spread: float = 1.0  # of the logits
    trained: tuple[str, ...] = TRAINED

    @property
    def cost(self) -> int:
        return self.rows * self.width * self.vocab

    def operands(self) -> Operands:
        generator = seeded()

        normal = normals(generator, self.dtype)
        labels = torch.randint(self.vocab, (self.rows,), generator=generator)
        if self.rows > 1:
            labels[0], labels[-1] = 0, self.vocab - 1
        drop = torch.randperm(self.rows, generator=generator)[: int(self.ignored * self.rows)]
        labels[drop] = self.ignore_index
        return {
            "hidden": normal(self.rows, self.width),
            "weight": normal(self.vocab, self.width, by=self.spread / self.width**0.5),
            "bias": normal(self.vocab) if self.bias else None,
            "labels": labels,
            "class_weight": torch.rand(self.vocab, generator=generator) + 0.1 if self.class_weight else None,
        }

    def poisoned(self) -> Operands:
        operands = self.operands()
        ignored = operands["labels"] == self.ignore_index
        return {**operands, "hidden": ignored_rows_poisoned(operands["hidden"], ignored)}

    def dense(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, class_weight: Any) -> Tensor:
        z = functional.linear(hidden, weight, bias) * self.scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        z = z / self.temperature
        options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        if not (labels != self.ignore_index).any() and self.reduction == "mean":
            return 0.0 * z.sum()  # where torch gives NaN
        loss = functional.cross_entropy(z, labels, class_weight, reduction=self.reduction, **options)
        if not self.z_loss:
            return loss
        extra = self.z_loss * z.logsumexp(-1).square() * (labels != self.ignore_index)
        if self.reduction == "none":
            return loss + extra
        return loss + extra.sum() / ((labels != self.ignore_index).sum() if self.reduction == "mean" else 1)

    def ours(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, class_weight: Any) -> Tensor:
        head = ll.LMHead(weight, bias, softcap=self.softcap, scale=self.scale)
        return ll.linear_cross_entropy(
            *(hidden, head, labels),
            weight=class_weight,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            ignore_index=self.ignore_index,
            temperature=self.temperature,
            memory_budget=2**20,
        )

    def exact(self) -> Outcome:
        return outcome(self.dense, self.operands(), self.trained, torch.float64)

    def found(self) -> Outcome:
        return outcome(self.ours, self.poisoned(), self.trained)

    def check(self) -> None:
        assert_held(self.found(), self.exact(), self.within)

    def check_against(self, function: Any) -> None:
        """The peer's own function on the same numbers, its ignored rows finite."""
        assert_same(self.found(), outcome(function, self.operands(), self.trained), self.within)

    def check_against_rounded(self, function: Any) -> None:
        """The same of a function whose logits are in the operands' dtype: where results differ, ours is the nearer."""
        theirs = outcome(function, self.operands(), self.trained)
        assert_same_or_nearer(self.found(), theirs, self.exact(), self.within)
