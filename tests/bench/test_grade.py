"""The script behind docs/grade.md, at sizes that take seconds; methods that are wrong must show in its tables."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
from transformers import Qwen3ForSequenceClassification

from bench.grade.run import main, write
from bench.grade.sizes import PAIRS, Sizes, storage, timing
from bench.grade.task import cosine, curves, draw, gradient, learning, legacy, method_of, opened, variance
from bench.harness import read_lines
from docs.tables.grade import grade, off
from logitless.workbench.common.written import METRICS_FILE
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.grade.methods import METHODS, StraightThrough
from logitless.workbench.grade.run import run
from logitless.workbench.runs.rundir import record
from tests.support.workbench.micro import line_corpus, micro_directory, micro_model

TINY = Sizes(vocab=300, hidden=64, layers=1, prompt=4, steps=4, k=16)
ENVIRONMENT = {
    "cpu": "A CPU", "threads": 1, "commit": "abc", "date": "2026-01-31 00:00 UTC",
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> SimpleNamespace:
    """Models and text in place of the embedded task's."""
    root = tmp_path_factory.mktemp("grade")
    model, reward = root / "model", root / "reward"
    micro_directory(model)
    micro_model(initializer_range=0.2).save_pretrained(model)
    shutil.copytree(model, reward, ignore=shutil.ignore_patterns("*.safetensors"))
    config = micro_model().config
    config.num_labels, config.initializer_range, config.pad_token_id = 2, 0.3, 0
    Qwen3ForSequenceClassification(config).save_pretrained(reward)
    config = GradeConfig(
        model=str(model), reward_model=str(reward), data=str(line_corpus(root / "data")), prompt_length=12,
        completion_length=4, batch_size=2, top_k=40, max_steps=4, learning_rate=3e-2, lora_rank=4, device="cpu",
    )  # fmt: skip
    return SimpleNamespace(config=config, root=root)


def page(kind: str, record: dict) -> str:
    """The page with one part on it, after a journey through JSON."""
    return grade([json.loads(json.dumps({"kind": kind, "environment": ENVIRONMENT, **record}))])


def test_curves_of_all_entries_lie_on_the_legacys(small):
    found = curves(small.config, 4)
    assert [row["step"] for row in found["rows"]] == [0, 1, 2, 3]
    assert found["rows"][0]["kl"] == pytest.approx([0, 0], abs=1e-5)
    assert min(found["rows"][-1]["kl"]) > 0.01
    assert max(off(found, "all")) < 1e-4 < max(off(found, "few"))
    assert found["rows"][0]["few"]["outside"] > 0.01
    assert found["rows"][0]["tau"] == 2.0
    assert found["late_kl"] > 0.1
    text = page("curves", found)
    assert "| `ste` at k=V against legacy, step by step | fp32 rounding |" in text
    assert text.count("| holds |") == 1


class WithoutKL(StraightThrough):
    """Rewards alone, as where the KL is logged and not added."""

    def __init__(self, task) -> None:
        super().__init__(dataclasses.replace(task, config=dataclasses.replace(task.config, beta=0.0)))


def test_a_method_that_forgets_its_kl_shows(small, monkeypatch):
    monkeypatch.setitem(METHODS, "ste", WithoutKL)
    found = curves(small.config, 3)
    reward, kl, slope = off(found, "all")
    assert max(reward, kl) < 1e-4
    assert slope > 1e-2
    assert "**does not hold**" in page("curves", found)


@pytest.mark.slow
def test_variance_is_that_of_a_runs_first_look(small):
    """Also the score function's, whose baseline is there by then."""
    found = variance(small.config, samples=8, blocks=2, taus=(2.0,))
    assert [(row["method"], row["tau"]) for row in found["rows"]] == [
        ("reinforce", 1.0), ("ste", 2.0), ("gumbel", 2.0)
    ]  # fmt: skip
    assert found["rows"][0]["cosine"] == pytest.approx(1.0)
    assert all(row["variance"] > 0 and len(row["variances"]) == 2 for row in found["rows"])
    for row in found["rows"][:2]:
        config = dataclasses.replace(
            small.config, method=row["method"], variance_samples=8, max_steps=1, gradient_accumulation_steps=1,
            output_dir=small.root / f"look-{row['method']}",
        )  # fmt: skip
        run(config)
        first = read_lines(config.output_dir / METRICS_FILE)[0]
        assert row["variance"] == pytest.approx(first["grad_variance"], rel=1e-4)
        assert row["mean_square"] == pytest.approx(first["grad_mean_square"], rel=1e-3)
    text = page("variance", found)
    assert "gradient variance, `ste` against `reinforce`" in text
    assert "| at most " in text


def test_draws_are_the_trainers_own(small):
    run = opened(small.config)
    batch, method = run.batch(run.prompts["train"][:2], "variance"), method_of(run, "ste")
    one, other = (gradient(method, draw(batch, i), 1.0)[0] for i in (0, 1))
    assert gradient(method, draw(batch, 0), 1.0)[0].equal(one)
    assert cosine(one, other) < 0.999


def test_storage_is_linear_in_steps_and_entries():
    found = storage(TINY, steps=(2, 8), ks=(8, 64))
    sizes = {(row["steps"], row["k"]): row["soft_bytes"] for row in found["rows"]}
    assert sizes[8, 8] == 4 * sizes[2, 8]
    assert 7 < sizes[2, 64] / sizes[2, 8] <= 8
    assert "| O(T·k) |" in page("storage", found)


def test_every_pair_takes_turns():
    found = timing(TINY, rounds=2)
    assert [row["method"] for row in found["rows"]] == list(PAIRS)
    assert all(len(row["ratios"]) == 2 for row in found["rows"])
    assert "time of a step, `ste`" in page("time", found)


def test_what_is_learned_is_read_from_a_comparison(small):
    own, near = (0.6, 0.7, 0.62), (0.61, 0.69, 0.63)
    rewards = {"ste": own, "reinforce": (0.3, 0.31, 0.32), "ppo": near, "ste_legacy": own}
    config = dataclasses.replace(small.config, max_steps=10, seeds=4)
    place = small.root / "all"
    for name, values in rewards.items():
        for seed, x in enumerate(values):
            after = {"val/reward_mean": 0.5, "test/reward_mean": x, "test/reward_std": 0.2, "test/kl": 1.0}
            run = {
                "method": name, "before": {"val/reward_mean": 0.25}, "after": after | {"test/samples": 8},
                "generalisation_gap": 0.01, "seconds_per_step": 2.0, "peak_memory_bytes": 1, "coverage": 0.9,
                "parameters": 1200, "trainable_parameters": 200, "vocab_size": 259,
                "memory_bytes": 60 if name == "ste_legacy" else 10, "training": {"reward": x, "kl": 2 * x},
                "grad_variances": [], "grad_mean_squares": [],
            }  # fmt: skip
            (place / f"{name}-{seed}").mkdir(parents=True)
            (place / f"{name}-{seed}" / "summary.json").write_text(json.dumps(run))
            rows = [{"step": n, "val/reward_mean": 0.1 * n + seed} for n in (0, 5)]
            (place / f"{name}-{seed}" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (place / "ste-3").mkdir()  # not finished
    (place / "ste-3" / "run.json").write_text("{}")
    record(config, place)
    text = page("learning", learning(place))
    assert "| `ste` | 0.640 (" in text
    assert "320 continuations of 4 tokens for every method, 8 test prompts" in text
    assert "3 seeds, 10 steps" in text
    assert "Not run: `gumbel`." in text
    assert "| `ppo` | 1.000 | 1.500 |" in text
    claims = [line for line in text.splitlines() if line.startswith("| test reward")]
    assert ["| holds |" in line for line in claims] == [True, False, True]
    assert "not shown either way" in claims[1]
    for path in place.glob("*-*/summary.json"):
        record(config, path.parent)
    text = page("legacy", legacy(place))
    assert "| memory of a batch | 0.167 × (0.167 to 0.167) |" in text
    assert "3 seeds of `ste`, 10 steps, batches of 2, 4 tokens, k=40" in text
    assert "| `ste`: memory 4× less than ste_legacy | **met** |" in text


@pytest.mark.slow
def test_memory_has_a_process_for_each_method(tmp_path):
    out = tmp_path / "grade.jsonl"
    write(out, {"kind": "time", "rows": []})
    sizes = {"vocab": 20000, "hidden": 64, "layers": 1, "steps": 16, "prompt": 4}
    main(["--part", "memory", *(f"--{name}={value}" for name, value in sizes.items()), "--out", str(out)])
    lines = read_lines(out)
    assert [line["kind"] for line in lines] == ["memory", "time"]
    rows = {(row["method"], row["carry"]): row for row in lines[0]["rows"]}
    ours, legacy = rows["ste", "sweeps"], rows["ste_legacy", None]
    assert ours["allocated_mb"] < legacy["allocated_mb"]
    assert 0.7 * legacy["told_mb"] < legacy["allocated_mb"] < 1.1 * legacy["told_mb"]
    assert ours["weights_mb"] == pytest.approx(legacy["weights_mb"])
    assert "peak memory above the weights" in grade(lines[:1])


def test_an_unmeasured_part_says_how_to_measure_it():
    assert "Not measured yet: `python -m bench.grade.run --part memory`." in grade([])
