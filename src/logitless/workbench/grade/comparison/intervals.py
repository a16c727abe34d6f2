"""Intervals over seeds: Student's, 95 %, of means, of paired differences and of paired ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

Record = dict[str, Any]

SAID = "95 %, Student's t over seeds"
FEWEST = 3  # values whose interval is shown: of two it is 13 standard errors to each side
# Of Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom; beyond, four terms of its expansion.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Z95 = 1.95996


def interval(values: Sequence[float]) -> Record:
    """{mean, low, high, values}: Student's 95 % interval of the mean; none of a single value."""
    mean, n = fmean(values), len(values)
    found: Record = {"mean": mean, "values": list(values)}
    if n < 2:
        return found
    half = t95(n - 1) * stdev(values) / math.sqrt(n)
    return found | {"low": mean - half, "high": mean + half}


def t95(df: int) -> float:
    """Student's t, two-sided 95 %, to a thousandth (Abramowitz and Stegun, 26.7.5)."""
    if df <= len(T95):
        return T95[df - 1]
    z = Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / df**power for power, term in enumerate(terms, 1))


def shown(found: Record) -> bool:
    """Whether an interval says enough to be shown."""
    return len(found["values"]) >= FEWEST


def differences(ours: Sequence[float], theirs: Sequence[float]) -> Record:
    """The interval of what ours is more than theirs, seed by seed."""
    return interval([a - b for a, b in zip(ours, theirs, strict=True)])


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Record:
    """The interval of how many times theirs ours is, seed by seed: of its logarithm, so that its inverse is its own."""
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    logarithms = interval([math.log(x) for x in found])
    return {key: found if key == "values" else math.exp(x) for key, x in logarithms.items()}
