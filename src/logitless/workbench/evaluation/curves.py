"""Sums over tokens from which curves are drawn: of calibration, and of a number against being right."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

KEYS = 1 << 16  # of a float's leading bits: numbers of one key differ by less than 0.8 %


@dataclass
class Calibration:
    """How often the best entry is the token, by the probability that it has."""

    bins: int
    unit: str = "tokens"  # what is counted, as the summary names it
    count: np.ndarray = field(init=False)
    confidence: np.ndarray = field(init=False)
    correct: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.count, self.confidence, self.correct = (np.zeros(self.bins) for _ in range(3))

    def add(self, confidence: np.ndarray, correct: np.ndarray) -> None:
        at = np.minimum((confidence * self.bins).astype(np.int64), self.bins - 1)
        self.count += np.bincount(at, minlength=self.bins)
        self.confidence += np.bincount(at, confidence, self.bins)
        self.correct += np.bincount(at, correct, self.bins)

    def summary(self) -> dict[str, Any]:
        """The expected calibration error, Σ n_b/n·|accuracy_b - confidence_b|, and its intervals that hold one."""
        gap = np.abs(self.correct - self.confidence).sum() / max(1, self.count.sum())
        rows = [
            {
                "from": b / self.bins,
                "to": (b + 1) / self.bins,
                self.unit: int(self.count[b]),
                "confidence": self.confidence[b] / self.count[b],
                "accuracy": self.correct[b] / self.count[b],
            }
            for b in np.flatnonzero(self.count).tolist()
        ]
        return {"expected_calibration_error": float(gap), "bins": rows}


class Spectrum:
    """The distribution of a number of 0 or more among tokens, or whatever is right or wrong, by its leading bits."""

    def __init__(self, unit: str = "tokens") -> None:
        self.unit = unit
        self.count = np.zeros((2, KEYS), dtype=np.int64)  # wrong, right
        self.total = np.zeros((2, KEYS))
        self.most = 0.0

    def add(self, values: np.ndarray, correct: np.ndarray) -> None:
        values = np.maximum(values, 0).astype(np.float32)
        self.most = max(self.most, float(values.max(initial=0)))
        keys = values.view(np.uint32) >> 15
        for side in (0, 1):
            here = correct == bool(side)
            self.count[side] += np.bincount(keys[here], minlength=KEYS)
            self.total[side] += np.bincount(keys[here], values[here], KEYS)

    def auroc(self) -> float | None:
        """The chance that a right token's number is above a wrong one's; of one key both count for a half."""
        wrong, right = self.count.astype(np.float64)
        if not wrong.sum() or not right.sum():
            return None
        below = np.cumsum(wrong) - wrong
        return float((right * (below + wrong / 2)).sum() / (right.sum() * wrong.sum()))

    def means(self) -> dict[str, float | None]:
        sums = zip(("wrong", "right"), self.count, self.total, strict=True)
        return {f"mean_where_{side}": float(t.sum() / n.sum()) if n.sum() else None for side, n, t in sums}

    def quantile(self, share: float) -> float:
        """The mean of the numbers that share the key of the one with `share` of all at or below it; the most of all."""
        if share == 1:
            return self.most
        count, total = self.count.sum(0), self.total.sum(0)
        key = int(np.searchsorted(np.cumsum(count), share * count.sum()))
        return float(total[key] / count[key])

    def groups(self, most: int) -> list[dict[str, Any]]:
        """About `most` groups of as many tokens each, from the least number up: its mean, and their accuracy."""
        count = self.count.sum(0)
        share = np.cumsum(count) * most / max(1, count.sum())
        edges = [0, *np.searchsorted(share, np.arange(1, most)) + 1, KEYS]
        return [
            {
                self.unit: int(count[a:b].sum()),
                "mean": float(self.total[:, a:b].sum() / count[a:b].sum()),
                "accuracy": float(self.count[1, a:b].sum() / count[a:b].sum()),
            }
            for a, b in pairwise(edges)
            if count[a:b].any()
        ]


class ByContext:
    """Nats and accuracy by how many tokens came before: 1, 2-3, 4-7, ..."""

    def __init__(self) -> None:
        self.count, self.nats, self.correct = (np.zeros(32) for _ in range(3))

    def add(self, context: np.ndarray, logprob: np.ndarray, correct: np.ndarray) -> None:
        at = np.log2(context).astype(np.int64)
        self.count += np.bincount(at, minlength=32)
        self.nats -= np.bincount(at, logprob, 32)
        self.correct += np.bincount(at, correct, 32)

    def summary(self) -> list[dict[str, Any]]:
        return [
            {
                "from": 1 << k,
                "to": (2 << k) - 1,
                "tokens": int(self.count[k]),
                "nats_per_token": self.nats[k] / self.count[k],
                "accuracy": self.correct[k] / self.count[k],
            }
            for k in np.flatnonzero(self.count).tolist()
        ]
