"""Each figure in the README's sentences, and some of the pages', is the one that a result file or the code gives."""

import re
from pathlib import Path

import pytest

from bench.harness import read_lines
from docs.tables.grade import memory_ratio
from docs.tables.pages import MARKED
from docs.tables.shared import RESULTS
from logitless.algebra.costs import DEFAULT_BUDGET

ROOT = Path(__file__).parents[2]
GRADE = {record["kind"]: record for record in read_lines(RESULTS / "grade.jsonl")}


def sentences() -> str:
    """The README without its generated table, each paragraph on one line."""
    text = (ROOT / "README.md").read_text("utf-8")
    return " ".join(MARKED.sub("", text).split())


def test_every_ratio_is_measured():
    found = [float(number) for number in re.findall(r"([\d.]+) ×", sentences())]
    assert found == [round(memory_ratio(GRADE["memory"]))]


def test_its_time_is_measured():
    ratios = {row["method"]: row["ratio"] for row in GRADE["time"]["rows"]}
    assert ratios["ste"] == pytest.approx(0.25, abs=0.03)
    assert "a quarter of its time" in sentences()


def test_sizes_are_computed():
    found = re.search(r"(\d+) GiB for ([\d,]+) tokens and ([\d,]+) vocabulary entries", sentences())
    assert found is not None
    tokens, vocab = (int(number.replace(",", "")) for number in found.groups()[1:])
    assert int(found[1]) == round(tokens * vocab * (2 + 4 + 4) / 2**30)
    assert f"slices of at most {DEFAULT_BUDGET >> 20} MiB" in sentences()


RUNS = {record.get("run"): record for record in read_lines(RESULTS / "real_align.jsonl")}


def test_what_smollm2_learns_beside_reinforce_is_measured():
    ste, reinforce = RUNS["all"]["methods"]["ste"], RUNS["reinforce"]["methods"]["reinforce"]
    gains = [run["test_reward"]["mean"] - run["val_reward_before"] for run in (ste, reinforce)]
    assert 0.85 < gains[0] / gains[1] < 1
    assert ste["test_kl"]["mean"] / reinforce["test_kl"]["mean"] == pytest.approx(1 / 3, abs=0.05)
    assert "with SmolLM2, in one run, nearly as much at a third of the KL" in sentences()


def test_what_smollm2_learns_is_measured():
    ste = RUNS["all"]["methods"]["ste"]
    said = (
        f"from {ste['val_reward_before']:.2f} to {ste['val_reward_after']:.2f} on 32 validation prompts, "
        f"at {ste['test_kl']['mean']:.1f} nats of KL a continuation of the test prompts"
    )
    assert said in " ".join((ROOT / "docs" / "how-to" / "grade.md").read_text("utf-8").split())
