"""Runs of all commands that are killed at random moments: they end as runs that nobody disturbs."""

import json
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from logitless.workbench.evaluation.config import EvalConfig
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.scoring.config import ScoreConfig, TextOptions
from tests.support.workbench.killing import curve, goes_on, killed_after, undisturbed

SEEDS, FAST = range(20), (0,)  # the fast one is killed once
LONG = ("compare", "eval")
pytestmark = pytest.mark.timeout(600)
COMPARED = GradeConfig(
    method="all",
    prompt_length=12,
    completion_length=3,
    batch_size=2,
    gradient_accumulation_steps=1,
    max_steps=2,
    learning_rate=1e-2,
    top_k=40,
    evaluation_prompts=4,
    variance_samples=2,
    lora_rank=2,
    device="cpu",
)


def options(command: str, start, micro) -> object:
    """A run of a few seconds, with more checkpoints, parts or epochs than one."""
    if command == "train":
        return replace(micro.config, max_steps=24)
    if command == "align":
        return replace(start, max_steps=8)
    if command == "compare":
        return replace(COMPARED, model=start.model, data=start.data)
    if command == "eval":
        return EvalConfig(model=start.model, data=start.data, against=start.model, device="cpu", batch_tokens=256)
    return ScoreConfig(model=start.model, data=start.data, keep=3, device="cpu", batch_tokens=256)


def placed(config, place: Path) -> object:
    return replace(config, **{"out" if isinstance(config, TextOptions) else "output_dir": place})


def result(place: Path) -> object:
    """What must not depend on kills: rows of a scoring, and documents; curve and weights of a training."""
    if place.is_file():
        return place.read_bytes()
    if (place / "documents.jsonl").exists():
        assert json.loads((place / "summary.json").read_text())["documents"] > 0
        return (place / "tokens.parquet").read_bytes(), (place / "documents.jsonl").read_bytes()
    if (place / "comparison.html").exists():
        return comparison(place), names(place)
    return curve(place), {name: x.tolist() for name, x in load_file(place / "model" / "model.safetensors").items()}


def comparison(place: Path) -> dict:
    """What a comparison came to, but for times."""
    found = json.loads((place / "summary.json").read_text())
    for one in found["methods"].values():
        del one["seconds_per_step"], one["peak_memory_bytes"]
    for one in found["beside_legacy"].values():
        del one["seconds_per_step"]
    return {**{name: found[name] for name in ("methods", "beside_legacy", "criteria", "curves")}, "runs": curve(place)}


def names(place: Path) -> list[str]:
    """Everything that a run leaves."""
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def has_ended(place: Path) -> bool:
    """Whether a run wrote the last of its files, and was killed at most on its way out; a comparison may go on then."""
    return place.is_file() or ((place / "summary.json").exists() and not (place / "comparison.html").exists())


@pytest.fixture(scope="module")
def whole(start, micro, tmp_path_factory):
    """The result of a command that nobody disturbs, and its seconds; each made once."""
    made: dict[str, tuple[object, float]] = {}

    def of(command: str) -> tuple[object, float]:
        if command not in made:
            place = tmp_path_factory.mktemp("whole") / "run"
            seconds = undisturbed(command, placed(options(command, start, micro), place))
            made[command] = result(place), seconds
        return made[command]

    return of


def each() -> list:
    """Commands and seeds; a few of them are fast enough to be always run."""
    slow = {True: [], False: [pytest.mark.slow]}
    commands = ("train", "align", "compare", "score", "eval")
    return [pytest.param(c, s, marks=slow[s in FAST and c not in LONG]) for c in commands for s in SEEDS]


@pytest.mark.parametrize(("command", "seed"), each())
def test_a_run_that_is_killed_at_random_moments(whole, start, micro, tmp_path, command, seed):
    expected, seconds = whole(command)
    place, moment = tmp_path / "run", random.Random(seed)
    config = placed(options(command, start, micro), place)
    for _ in range(1 + seed % 3):
        status = killed_after(moment.uniform(0, seconds), command, goes_on(place, config))
        assert status in (0, -signal.SIGKILL)
        if status == 0 or has_ended(place):
            break
    else:
        assert killed_after(300, command, goes_on(place, config)) == 0
    assert result(place) == expected
