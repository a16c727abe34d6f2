"""What the paper and the report on its code promise, held against a comparison: met, not met, or not shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev
from typing import Any

from .intervals import differences, interval, ratios

Record = dict[str, Any]
Runs = dict[str, list[Record]]  # a method's summaries, in the order of the seeds

LEGACY_OF = {"ste": "ste_legacy", "gumbel": "gumbel_legacy"}
MEMORY, VARIANCE = 4.0, 14.0  # times less than the legacy's, and than the score function's
MET, NOT_MET, NOT_SHOWN = "met", "not met", "not shown"
ONE, FEW = "one seed has no interval", "too few seeds to tell"
ALIKE = (
    ("reward in training", lambda x: x["training"]["reward"]),
    ("KL in training", lambda x: x["training"]["kl"]),
    ("test reward", lambda x: x["after"]["test/reward_mean"]),
)


def beside_legacy(runs: Runs) -> dict[str, Record]:
    """Of each new method whose legacy ran too: how many times the legacy's memory, time and gradient variance, and by
    how much rewards and KL differ, seed by seed."""
    found = {}
    for new, old in LEGACY_OF.items():
        if not (new in runs and old in runs):
            continue
        ours, theirs = runs[new], runs[old]
        found[new] = {"legacy": old, "seconds_per_step": ratios(*(_of(x, "seconds_per_step") for x in (ours, theirs)))}
        if all(x["memory_bytes"] for x in (*ours, *theirs)):
            found[new]["memory"] = ratios(_of(ours, "memory_bytes"), _of(theirs, "memory_bytes"))
        if _vary([*ours, *theirs]):
            found[new]["grad_variance"] = ratios(_variances(ours), _variances(theirs))
        for name, value in (*ALIKE, ("test KL", lambda x: x["after"]["test/kl"])):
            found[new][name] = differences([value(x) for x in ours], [value(x) for x in theirs])
    return found


def criteria(runs: Runs, left_out: dict[str, str]) -> list[Record]:
    """[{criterion, method, against, expected, measured, verdict, why}], of the report first, then the paper's."""
    beside, rows = beside_legacy(runs), []
    for new, old in LEGACY_OF.items():
        given = {"method": new, "against": old}
        if new not in beside:
            why = left_out.get(old) or f"{old if new in runs else new} did not run"
            rows += [given | _unshown(name, why) for name in ("memory", *(name for name, _ in ALIKE))]
            continue
        rows.append(given | _memory(beside[new], old))
        for name, value in ALIKE:
            rows.append(given | _alike(name, beside[new][name], old, [value(x) for x in runs[old]]))
    for other in ("reinforce", "ppo"):
        if "ste" in runs and other in runs:
            given = {"method": "ste", "against": other}
            if other == "reinforce":
                rows.append(given | _calmer(runs["ste"], runs[other], other))
            rewards = ([x["after"]["test/reward_mean"] for x in runs[name]] for name in ("ste", other))
            rows.append(given | _better(differences(*rewards), other))
    return rows


def _of(summaries: Sequence[Record], name: str) -> list[float]:
    return [x[name] for x in summaries]


def _vary(summaries: Sequence[Record]) -> bool:
    """Whether ratios can be formed of runs' gradient variances: none was left out, is 0, or was not finite (null)."""
    return all(x["grad_variances"] and all(y is not None and y > 0 for y in x["grad_variances"]) for x in summaries)


def _variances(summaries: Sequence[Record]) -> list[float]:
    """A run's gradient variance: the geometric mean over its looks, which may be orders of magnitude apart."""
    return [math.exp(interval([math.log(x) for x in one["grad_variances"]])["mean"]) for one in summaries]


def _unshown(name: str, why: str) -> Record:
    return {"criterion": name, "expected": "", "measured": None, "verdict": NOT_SHOWN, "why": why}


def _judged(name: str, expected: str, measured: Record, met: bool, refuted: bool) -> Record:
    """A row by what its interval shows; one seed shows nothing."""
    seen = "low" in measured
    verdict = (MET if met else NOT_MET if refuted else NOT_SHOWN) if seen else NOT_SHOWN
    why = ONE if not seen else FEW if verdict == NOT_SHOWN else ""
    return {"criterion": name, "expected": expected, "measured": measured, "verdict": verdict, "why": why}


def _memory(beside: Record, legacy: str) -> Record:
    """A count of bytes: the seeds only change how long prompts are, so one of them is enough."""
    expected = f"{MEMORY:g}× less than {legacy}"
    if "memory" not in beside:
        return _unshown("memory", "not measured by the version that began a run") | {"expected": expected}
    measured = beside["memory"]
    met = max(measured["values"]) <= 1 / MEMORY
    return {
        "criterion": "memory",
        "expected": expected,
        "measured": measured,
        "verdict": MET if met else NOT_MET,
        "why": "",
    }


def _alike(name: str, measured: Record, legacy: str, its: Sequence[float]) -> Record:
    """Equivalent: the whole interval lies within what two seeds of the legacy differ by, in root mean square."""
    noise = math.sqrt(2) * stdev(its) if len(its) > 1 else math.nan
    low, high = measured.get("low", math.nan), measured.get("high", math.nan)
    expected = f"as {legacy}'s{f' ±{noise:.2g}' if len(its) > 1 else ''}"
    return _judged(name, expected, measured, -noise <= low and high <= noise, low > 0 or high < 0)


def _calmer(ours: Sequence[Record], theirs: Sequence[Record], other: str) -> Record:
    """By the look that decides, since what is promised holds at each: one that refutes it, else the least lower."""
    name, expected = "gradient variance", f"{VARIANCE:g}× lower than {other}'s at each look"
    if not all(x["grad_variances"] for x in (*ours, *theirs)):
        return _unshown(name, "not measured: --variance-samples 2 or more") | {"expected": expected}
    if not _vary([*ours, *theirs]):
        return _unshown(name, "a gradient did not vary, or was not finite") | {"expected": expected}
    looks = (zip(*(x["grad_variances"] for x in runs), strict=True) for runs in (ours, theirs))
    each = [ratios(*look) for look in zip(*looks, strict=True)]
    measured = max(each, key=lambda x: (x.get("low", 0) > 1 / VARIANCE, x.get("high", x["mean"])))
    met, refuted = measured.get("high", 1) <= 1 / VARIANCE, measured.get("low", 0) > 1 / VARIANCE
    return _judged(name, expected, measured, met, refuted)


def _better(measured: Record, other: str) -> Record:
    above, below = measured.get("low", 0) > 0, measured.get("high", 1) <= 0
    return _judged("test reward", f"above {other}'s", measured, above, below)
