"""Checkpoints and files of a run that were changed since: one line that names what is wrong, or the run goes on."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from logitless.errors import LogitlessError
from logitless.workbench.align import run as align
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.runs.rundir import stored
from logitless.workbench.sft import run as sft
from logitless.workbench.sft.config import TrainConfig
from tests.support.workbench.damage import JSON
from tests.support.workbench.unmeasured import leave_unmeasured

QUIET = Console(quiet=True)
STATE = "checkpoint-2/trainer_state.json"
VALUES = [None, True, -1, 8.7, 10**30, float("inf"), float("nan"), "x", [1], [], {"a": 1}]
SOME = 20  # changes, always the same ones: each costs a tenth of a second


@pytest.fixture(scope="module")
def trained(micro, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "trained"
    with pytest.MonkeyPatch.context() as patch:
        leave_unmeasured(patch)
        sft.run(replace(micro.config, max_steps=2, output_dir=place), QUIET)
    return place


@pytest.fixture(scope="module")
def aligned(start, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "aligned"
    align.run(replace(start, method="grpo", max_steps=2, output_dir=place), QUIET)
    return place


def resumed(run: Path, command: str = "train") -> str:
    """What going on for a step says: nothing, or one line."""
    kind, module = (TrainConfig, sft) if command == "train" else (AlignConfig, align)
    said = ""
    try:
        module.run(replace(stored(run, kind()), resume=run, max_steps=3), QUIET)
    except LogitlessError as error:
        said = str(error)
    assert "\n" not in said
    return said


def with_values(content: dict) -> list[dict]:
    """The content with each of its values in turn replaced by each of some, and without it."""
    changed = [{**content, name: value} for name in content for value in VALUES]
    changed += [{k: x for k, x in content.items() if k != name} for name in content]
    return random.Random(0).sample(changed, min(SOME, len(changed)))


@pytest.fixture
def not_trained(monkeypatch):
    """A run whose files are fine goes no further than what they are held against, since each step takes a while."""

    def accept(self, *_, **__):
        raise LogitlessError("")

    monkeypatch.setattr("transformers.Trainer._inner_training_loop", accept)
    monkeypatch.setattr(align, "_examples", lambda *_: None)


FILES = ["run.json", "metrics.jsonl", "step_memory.json", "tokens.npz", STATE]


@pytest.mark.usefixtures("not_trained")
@pytest.mark.parametrize("name", FILES)
def test_files_in_whose_place_anything_lies(trained, tmp_path, name):
    for kind, change in JSON.items():
        run = Path(shutil.copytree(trained, tmp_path / kind))
        change(run / name)
        said = resumed(run)
        goes_on = name in (STATE, "metrics.jsonl") and not said  # as a kill leaves them
        assert goes_on or name in said, kind


@pytest.mark.usefixtures("not_trained")
@pytest.mark.parametrize("name", ["rows.jsonl", "metrics.jsonl", "completions.json", STATE])
def test_files_of_an_alignment_in_whose_place_anything_lies(aligned, tmp_path, name):
    for kind, change in JSON.items():
        run = Path(shutil.copytree(aligned, tmp_path / kind))
        change(run / name)
        resumed(run, "align")


@pytest.mark.usefixtures("not_trained")
@pytest.mark.parametrize("name", [STATE, "run.json", "step_memory.json"])
def test_values_of_other_kinds(trained, tmp_path, name):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    content = json.loads((run / name).read_text())
    for changed in with_values(content):
        (run / name).write_text(json.dumps(changed))
        resumed(run)
        if not (run / "checkpoint-2").exists():
            shutil.rmtree(run)
            shutil.copytree(trained, run)


@pytest.mark.usefixtures("not_trained")
@pytest.mark.parametrize("command", ["train", "align"])
def test_records_of_other_kinds(trained, aligned, tmp_path, command):
    run = Path(shutil.copytree(trained if command == "train" else aligned, tmp_path / "run"))
    for name in ("metrics.jsonl", "rows.jsonl")[: 1 + (command == "align")]:
        first, *rest = (run / name).read_text().splitlines()
        for changed in [{}, {"step": "x"}, *with_values(json.loads(first))]:
            (run / name).write_text("\n".join([json.dumps(changed), *rest, ""]))
            resumed(run, command)
        (run / name).write_text("\n".join([first, *rest, ""]))


@pytest.mark.parametrize("value", ["x", 8.7, 0, -1, [1], True, 10**30])
def test_ranks_without_a_meaning(trained, tmp_path, value):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, "ranks": value}))
    assert "run.json says ranks" in resumed(run)


@pytest.mark.parametrize("value", [10**30, -5, "2", True, 2.0, 8.7, None, [2], 1])
def test_a_step_that_is_not_the_checkpoints(trained, tmp_path, value):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    content = json.loads((run / STATE).read_text())
    (run / STATE).write_text(json.dumps({**content, "global_step": value}))
    assert "trainer_state.json is damaged; remove" in resumed(run)
    assert (run / "checkpoint-2").exists()


def test_a_checkpoints_place_without_what_it_should_say(trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / STATE).write_text(json.dumps({"global_step": 2}))
    assert "trainer_state.json: train_batch_size: expected a number, got NoneType" in resumed(run)


def _no_state(saved: dict) -> None:
    saved["state"] = {}


def _one_lost(saved: dict) -> None:
    del saved["state"][3]


def _shapes(saved: dict) -> None:
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].reshape(-1)[:3]


def _transposed(saved: dict) -> None:
    state = next(x for x in saved["state"].values() if x["exp_avg_sq"].ndim == 2)
    state["exp_avg_sq"] = state["exp_avg_sq"].T.contiguous()


def _no_moment(saved: dict) -> None:
    for state in saved["state"].values():
        del state["exp_avg"]


def _group(saved: dict) -> None:
    saved["param_groups"][0]["betas"] = "x"


def _another_beta(saved: dict) -> None:
    saved["param_groups"][0]["betas"] = (0.9, 2.0)


def _amsgrad(saved: dict) -> None:
    saved["param_groups"][-1]["amsgrad"] = True


def _before_the_first_step(saved: dict) -> None:
    saved["state"][0]["step"] = torch.tensor(-3.0)


CHANGES = {
    "optimizer.pt: betas: expected (0.9, 0.999), got (0.9, 2.0)": _another_beta,
    "optimizer.pt: amsgrad: expected False, got True": _amsgrad,
    "optimizer.pt: step -3, expected none below 0": _before_the_first_step,
    "optimizer.pt has no state": _no_state,
    "optimizer.pt has no state of model.": _one_lost,
    "optimizer.pt: exp_avg of model.": _shapes,
    "optimizer.pt: exp_avg_sq of model.": _transposed,
    "expected shape": _no_moment,
    "optimizer.pt: betas": _group,
}


def test_an_optimizer_whose_step_is_text(trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    path = run / "checkpoint-2" / "optimizer.pt"
    saved = torch.load(path)
    saved["state"][0]["step"] = "x"
    torch.save(saved, path)
    assert "checkpoint-2 does not hold what was written there" in resumed(run)


@pytest.mark.usefixtures("not_trained")
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "run_id"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(trained, tmp_path, name):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    JSON["a pipe"](run / "checkpoint-2" / name)
    assert "checkpoint-2" in resumed(run)


@pytest.mark.parametrize("said", CHANGES)
def test_an_optimizer_that_lacks_something_is_refused(trained, tmp_path, said):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    path = run / "checkpoint-2" / "optimizer.pt"
    saved = torch.load(path)
    CHANGES[said](saved)
    torch.save(saved, path)
    found = resumed(run)
    assert said in found
    assert f"{run / 'checkpoint-2'} does not hold what was written there" in found
    assert "remove it to go on from an earlier one" in found


def test_a_schedule_of_other_kinds_or_of_another_step(trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    path = run / "checkpoint-2" / "scheduler.pt"
    saved = torch.load(path)
    for name in ("last_epoch", "_step_count", "base_lrs"):
        for value in ("x", None, ["x"], 10**30 if name == "last_epoch" else {}):
            torch.save({**saved, name: value}, path)
            assert "checkpoint-2 does not hold" in resumed(run), (name, value)


def test_what_was_not_changed_goes_on(trained, tmp_path):
    assert resumed(Path(shutil.copytree(trained, tmp_path / "run"))) == ""
