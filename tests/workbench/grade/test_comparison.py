"""A comparison's verdicts, curves, tables and page, of summaries whose answer is known."""

import io
import json
import math
import re
from random import Random
from statistics import stdev

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from logitless.workbench.grade.comparison.criteria import MET, NOT_MET, NOT_SHOWN, criteria
from logitless.workbench.grade.comparison.curves import PANELS, _line, curves, draw
from logitless.workbench.grade.comparison.intervals import differences, interval, ratios, t95
from logitless.workbench.grade.comparison.report import (
    PAGE_FILE,
    PLOT_FILE,
    _criteria,
    _less,
    _lines,
    _methods,
    _said,
    relative,
    show,
    table,
    write_page,
)

METHODS = ("ste", "gumbel", "reinforce", "ppo", "ste_legacy", "gumbel_legacy")


def one(method: str, seed: int, **changes) -> dict:
    """A run's summary: all methods alike but for memory, and noise that the seeds of all share."""
    noise = Random(seed).gauss(0, 0.05)
    legacy = method.endswith("_legacy")
    usual = {
        "reward": 0.8 + noise,
        "kl": 3.0 + 10 * noise,
        "test": 0.85 + noise,
        "memory_bytes": (120 if legacy else 20) << 20,
        "variance": 1.0 + noise,
        "seconds_per_step": 4.0 if legacy else 2.0,
    } | changes
    return {
        "method": method,
        "before": {"val/reward_mean": 0.3},
        "after": {
            "val/reward_mean": usual["test"],
            "test/reward_mean": usual["test"],
            "test/reward_std": 0.3,
            "test/kl": usual["kl"],
            "test/samples": 128,
        },
        "training": {"reward": usual["reward"], "kl": usual["kl"]},
        "grad_variances": usual.get("variances", [usual["variance"], 10 * usual["variance"]]),
        "grad_mean_squares": [0.1, 0.1],
        "generalisation_gap": 0.01,
        "seconds_per_step": usual["seconds_per_step"],
        "memory_bytes": usual["memory_bytes"],
        "peak_memory_bytes": 1 << 30,
        "coverage": 0.9,
    }


def verdicts(seeds: int = 5, methods=METHODS, left_out=None, **changed) -> dict[tuple[str, str, str], tuple[str, str]]:
    """(verdict, why) of each criterion; changed: of a method, what a function of the seed gives."""
    runs = {m: [one(m, n, **changed.get(m, lambda n: {})(n)) for n in range(seeds)] for m in methods}
    found = criteria(runs, left_out or {})
    return {(x["method"], x["against"], x["criterion"]): (x["verdict"], x["why"]) for x in found}


def test_what_equals_its_legacy_in_a_sixth_of_the_memory_meets_the_reports_criteria():
    found = verdicts(reinforce=lambda n: {"variance": 100.0})
    for new in ("ste", "gumbel"):
        for name in ("memory", "reward in training", "KL in training", "test reward"):
            assert found.pop((new, f"{new}_legacy", name)) == (MET, "")
    assert found.pop(("ste", "reinforce", "gradient variance")) == (MET, "")
    assert set(found) == {("ste", "reinforce", "test reward"), ("ste", "ppo", "test reward")}


def test_differences_beyond_the_legacys_noise_do_not():
    found = verdicts(
        ste=lambda n: {"memory_bytes": 40 << 20, "kl": 5.0 + 0.001 * n},
        gumbel=lambda n: {"test": 0.85 + 0.5 * (-1) ** n},
        reinforce=lambda n: {"variance": 2.0},
        ppo=lambda n: {"test": 0.99 + 0.001 * n},
    )
    assert found["ste", "ste_legacy", "memory"][0] == NOT_MET
    assert found["ste", "ste_legacy", "KL in training"][0] == NOT_MET
    assert found["ste", "ste_legacy", "test reward"][0] == MET
    assert found["gumbel", "gumbel_legacy", "test reward"] == (NOT_SHOWN, "too few seeds to tell")
    assert found["ste", "reinforce", "gradient variance"][0] == NOT_MET
    assert found["ste", "ppo", "test reward"][0] == NOT_MET


@pytest.mark.parametrize(
    ("memory", "variance", "memory_verdict", "variance_verdict"),
    [(30, 14.1, MET, MET), (31, 13.9, NOT_MET, NOT_MET)],
)
def test_four_times_less_memory_and_fourteen_times_less_variance(memory, variance, memory_verdict, variance_verdict):
    """Of 120 MiB, by the seed that takes the most; and not nearly so."""
    found = verdicts(
        ste=lambda n: {"memory_bytes": (memory if n == 1 else 20) << 20, "variances": [1.0, 1.0]},
        reinforce=lambda n: {"variances": [variance, 100.0]},
    )
    assert found["ste", "ste_legacy", "memory"][0] == memory_verdict
    assert found["ste", "reinforce", "gradient variance"][0] == variance_verdict


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("errors", "verdict"), [(1.3, MET), (1.5, NOT_MET)])
def test_alike_is_what_two_seeds_of_the_legacy_differ_by(errors, verdict, sign):
    """In root mean square: √2 standard deviations of one, to either side."""
    rewards = [0.5, 0.7, 0.6, 0.9]
    off = sign * errors * stdev(rewards)
    found = verdicts(4, ste=lambda n: {"reward": rewards[n] + off}, ste_legacy=lambda n: {"reward": rewards[n]})
    assert found["ste", "ste_legacy", "reward in training"][0] == verdict


@pytest.mark.parametrize(
    ("more", "verdict"),
    [((0.01, 0.01), MET), ((-0.01, -0.01), NOT_MET), ((0.0, 0.0), NOT_MET), ((0.02, -0.01), NOT_SHOWN)],
)
def test_better_is_above_by_the_whole_interval(more, verdict):
    found = verdicts(ppo=lambda n: {"test": 0.5 + 0.1 * n}, ste=lambda n: {"test": 0.5 + 0.1 * n + more[n % 2]})
    assert found["ste", "ppo", "test reward"][0] == verdict


def test_what_is_promised_of_the_variance_holds_at_each_look():
    """A mean over looks that are orders of magnitude apart would hide the one at which it does not."""
    found = verdicts(
        ste=lambda n: {"variances": [0.001 + 1e-5 * n, 1.0 + 0.01 * n]}, reinforce=lambda n: {"variances": [10.0, 10.0]}
    )
    assert found["ste", "reinforce", "gradient variance"][0] == NOT_MET


@pytest.mark.parametrize(("narrow", "wide", "verdict"), [(0.05, (0.01, 0.16), NOT_SHOWN), (0.08, (0.05, 0.5), NOT_MET)])
def test_a_look_decides_by_its_interval(narrow, wide, verdict):
    """The other look's mean is worse than 1/14, or better, and says nothing of this one's interval."""
    found = verdicts(
        ste=lambda n: {"variances": [narrow + 1e-4 * n, wide[n % 2]]}, reinforce=lambda n: {"variances": [1.0, 1.0]}
    )
    assert found["ste", "reinforce", "gradient variance"][0] == verdict


def test_one_seed_shows_memory_alone():
    found = verdicts(seeds=1)
    assert {key for key, (verdict, _) in found.items() if verdict != NOT_SHOWN} == {
        ("ste", "ste_legacy", "memory"),
        ("gumbel", "gumbel_legacy", "memory"),
    }
    assert all(why == "one seed has no interval" for verdict, why in found.values() if verdict == NOT_SHOWN)


def test_a_legacy_that_does_not_fit_shows_nothing_and_says_why():
    found = verdicts(methods=METHODS[:4], left_out={"ste_legacy": "a batch needs 40 GiB", "gumbel_legacy": "too"})
    assert found["ste", "ste_legacy", "memory"] == (NOT_SHOWN, "a batch needs 40 GiB")
    assert found["gumbel", "gumbel_legacy", "test reward"] == (NOT_SHOWN, "too")
    assert ("ste", "reinforce", "gradient variance") in found


def test_what_did_not_run_or_was_not_measured_shows_nothing_and_says_why():
    found = verdicts(methods=("ste", "gumbel_legacy"))
    assert found["ste", "ste_legacy", "memory"] == (NOT_SHOWN, "ste_legacy did not run")
    assert found["gumbel", "gumbel_legacy", "test reward"] == (NOT_SHOWN, "gumbel did not run")
    found = verdicts(ste=lambda n: {"memory_bytes": None if n else 20 << 20, "variances": []})
    assert found["ste", "ste_legacy", "memory"] == (NOT_SHOWN, "not measured by the version that began a run")
    why = "not measured: --variance-samples 2 or more"
    assert found["ste", "reinforce", "gradient variance"] == (NOT_SHOWN, why)


def test_what_is_expected_is_said():
    expected = {
        x["criterion"]: x["expected"] for x in criteria({m: [one(m, n) for n in range(3)] for m in METHODS}, {})
    }
    assert expected["memory"] == "4× less than gumbel_legacy"
    assert expected["gradient variance"] == "14× lower than reinforce's at each look"
    assert expected["KL in training"].startswith("as gumbel_legacy's ±")


def test_variances_of_looks_are_compared_by_their_geometric_mean():
    runs = [one(m, n, variances=[1.0, x]) for m, x in (("ste", 100.0), ("ste_legacy", 1.0)) for n in range(3)]
    assert table(runs)["beside_legacy"]["ste"]["grad_variance"]["mean"] == pytest.approx(10.0)


def test_pairs_are_of_one_seed():
    """What all methods share in a seed is in no difference; unpaired, the same numbers would be five times as wide."""
    ours, theirs = ([one(m, n)["training"]["reward"] + 1e-3 * n * (m == "ste") for n in range(5)] for m in METHODS[::4])
    found = differences(ours, theirs)
    assert found["mean"] == pytest.approx(2e-3)
    assert found["high"] - found["low"] < 0.2 * stdev(theirs)
    twice, half = ratios([2.0, 4.0], [1.0, 1.0]), ratios([1.0, 1.0], [2.0, 4.0])
    assert twice["mean"] == pytest.approx(8**0.5)
    assert half["high"] == pytest.approx(1 / twice["low"])


def records(seeds: int) -> list[dict]:
    return [
        {"method": m, "seed": n, "step": step}
        | {"train/reward": 0.1 * step + 0.01 * n, "train/kl": step + 0.1 * n, "grad_norm": 1.0 + n, "tau": 1.0}
        | {
            "coverage": 0.9,
            "seconds": 2.0,
            "val/reward_mean": 0.5,
            "grad_variance": math.exp(n),
            "memory_bytes": 1 << 20,
        }
        for m in METHODS
        for n in range(seeds)
        for step in range(4)
    ]


def test_students_t_of_any_number_of_seeds():
    known = {
        1: 12.7062,
        2: 4.3027,
        3: 3.1824,
        4: 2.7764,
        5: 2.5706,
        6: 2.4469,
        7: 2.3646,
        8: 2.3060,
        9: 2.2622,
        10: 2.2281,
        12: 2.1788,
        20: 2.0860,
        30: 2.0423,
        100: 1.9840,
        10**6: 1.95996,
    }
    assert all(t95(df) == pytest.approx(t, rel=3e-4) for df, t in known.items())


def test_curves_have_intervals_over_seeds():
    found = curves(records(3))
    assert set(found) == {"train/reward", "train/kl", "val/reward_mean", "grad_variance"}
    point = found["train/reward"]["gumbel_legacy"][2]
    assert point == {"step": 2, **interval([0.2 + 0.01 * n for n in range(3)])}
    assert found["grad_variance"]["ste"][0]["mean"] == pytest.approx(math.e)
    assert not any("low" in x for of in curves(records(1)).values() for points in of.values() for x in points)


def test_curves_of_a_gradient_that_does_not_vary_and_of_memory():
    """No logarithm is taken of 0; memory is in MiB, as its panel says."""
    still = [r | {"grad_variance": 0.0} if r["seed"] == 0 else r for r in records(2)]
    assert curves(still)["grad_variance"]["ste"][0]["mean"] == pytest.approx(math.e / 2)
    (memory,) = (value for key, _, value in PANELS if key == "memory_bytes")
    assert memory({"memory_bytes": 3 << 20}) == 3.0


@pytest.mark.parametrize("seeds", [2, 3])
def test_a_band_is_drawn_where_an_interval_is_shown(seeds):
    """Of two seeds it would fill the panel."""
    found, axes = curves(records(seeds))["train/reward"], Figure().subplots()
    for name, points in found.items():
        _line(axes, name, points)
    assert len(axes.lines) == len(METHODS)
    assert len(axes.collections) == (len(METHODS) if seeds > 2 else 0)


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_tables_and_page_say_the_same_in_80_columns(tmp_path, seeds):
    summary = {
        "method": "all",
        "model": "m<b>",
        "steps": 3,
        "seeds": seeds,
        "left_out": {},
        "output_dir": str(tmp_path),
    }
    less = {"ste": {"memory_bytes": 90 << 20}}  # not a quarter of its legacy's
    runs = [one(m, n, **less.get(m, {}), test=0.8 + 0.01 * n * len(m)) for m in METHODS for n in range(seeds)]
    summary |= table(runs)
    draw(tmp_path / PLOT_FILE, records(seeds))
    made = {"prompt": "once", "tokens": [{"text": " <up>", "special": False, "logprob": -1.0}], "reward": 0.25}
    write_page(tmp_path / PAGE_FILE, tmp_path / PLOT_FILE, summary, {"ste": {"before": made, "after": made}})
    console = Console(file=io.StringIO(), width=80)
    show(summary, console)
    text, page = console.file.getvalue(), (tmp_path / PAGE_FILE).read_text()
    assert "…" not in text
    assert "m&lt;b&gt;" in page
    for said in ("ste / ste_legacy", "gumbel / gumbel_legacy", "0.167 ×", "120 MiB", "not met"):
        assert said in text
        assert said in page
    ends = re.findall(r"\([-+.\d]+ to [-+.\d]+\)", text)
    assert bool(ends) == bool(re.search(r"\([-+.\d]+ to ", page)) == (seeds > 2)  # of two they would be 13 errors wide
    assert ("intervals: not shown: " in text) == (seeds < 3)
    assert ("bands: " in page) == (seeds > 2)
    assert "<td>ste</td><td>after</td><td>0.250</td><td>once</td><td> &lt;up&gt;</td>" in page
    assert "±0.000" not in text
    assert json.loads(json.dumps(summary)) == summary


def test_the_numbers_of_a_row():
    runs = [one("ste", n, test=0.8 + 0.02 * n, kl=3.0, variance=1.0, memory_bytes=(20 + n) << 20) for n in range(3)]
    for run in runs:
        run["training"]["kl"] = 9.0  # which is not the test's
    found = table(runs) | {"seeds": 3, "left_out": {}}
    assert list(_methods(found)) == [["ste", "0.820", "0.30", "0.770-0.870", "3.00", "+0.010", "55", "2.00", "22 MiB"]]
    before, columns, *_ = _lines(found)
    assert before == "validation reward before: 0.300; reward, sd: of 128 test samples"
    assert columns == "gap: reward in training less that of the test; var/mean²: of a batch's gradient"
    other = [one("ppo", n, test=0.7) for n in range(3)]
    assert table([*runs, *other])["methods"]["ppo"]["test_reward_minus_ste"]["mean"] == pytest.approx(-0.12)
    assert relative({"grad_variance": 1.0, "grad_mean_square": 0.0}) == math.inf


def test_a_ratio_is_also_said_the_other_way_round():
    ratio = {"mean": 0.25, "low": 0.2, "high": 0.5, "values": [0.2, 0.25, 0.5]}
    assert _said(ratio, times=True) == "0.25 × (0.2 to 0.5)"
    assert _less(ratio) == "4× less (2 to 5)"
    assert _said({"mean": 1.0, "low": 1.0, "high": 1.0, "values": [1.0] * 3}, times=True) == "1 ×"
    row = {"criterion": "gradient variance", "method": "ste", "against": "ppo", "expected": "", "verdict": MET}
    assert [*_criteria({"criteria": [row | {"measured": ratio, "why": ""}]})] == [
        [MET, "ste: gradient variance against ppo", "4× less (2 to 5)"]
    ]


@pytest.mark.parametrize("variance", [0.0, None])
def test_a_gradient_variance_without_a_ratio_has_none(variance):
    """0 where no reward depends on the tokens, null where a gradient was not finite: all else is compared."""
    runs = [one(m, n, **({} if m == "ppo" else {"variance": 1.0})) for m in METHODS for n in range(3)]
    for run in runs:
        if run["method"] in ("ste", "gumbel"):
            run["grad_variances"][0] = variance
            if variance is None:
                run["grad_mean_squares"][0] = None
    found = table(runs)
    assert "grad_variance" not in found["beside_legacy"]["ste"]
    assert found["beside_legacy"]["ste"]["memory"]["mean"] < 1
    row = next(x for x in found["criteria"] if x["criterion"] == "gradient variance")
    assert (row["verdict"], row["why"]) == (NOT_SHOWN, "a gradient did not vary, or was not finite")
    assert found["methods"]["ste"]["grad_variance"] == (5.0 if variance == 0 else 10.0)
