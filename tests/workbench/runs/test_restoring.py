"""Checkpoints and files of a run that were changed since: one line that names what is wrong, or the run goes on."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from logitless.errors import LogitlessError
from logitless.workbench.align import run as align
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.common.files import read_lines
from logitless.workbench.common.options import DEFAULT_MODEL
from logitless.workbench.common.sealed import read_sealed, write_sealed
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


def resumed(run: Path, command: str = "train", max_steps: int = 3) -> str:
    """What going on, for a step unless told otherwise, says: nothing, or one line."""
    kind, module = (TrainConfig, sft) if command == "train" else (AlignConfig, align)
    said = ""
    try:
        module.run(replace(stored(run, kind()), resume=run, max_steps=max_steps), QUIET)
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
        assert said == "" if name == "metrics.jsonl" else name in said, kind  # a checkpoint has its own copy


@pytest.mark.usefixtures("not_trained")
@pytest.mark.parametrize("name", ["rows.jsonl", "metrics.jsonl", "completions.json", STATE])
def test_files_of_an_alignment_in_whose_place_anything_lies(aligned, tmp_path, name):
    for kind, change in JSON.items():
        run = Path(shutil.copytree(aligned, tmp_path / kind))
        change(run / name)
        said = resumed(run, "align")
        assert said == "" if name in ("metrics.jsonl", "completions.json") else name in said, kind


@pytest.mark.usefixtures("not_trained")
@pytest.mark.parametrize("name", ["run.json", "step_memory.json"])
def test_values_of_other_kinds(trained, tmp_path, name):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    content = json.loads((run / name).read_text())
    for changed in with_values(content):
        (run / name).write_text(json.dumps(changed))
        resumed(run)


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


def changed_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {name: JSON[name] for name in ("empty", "half", "a folder", "a pipe")}
DAMAGE |= {"one byte": changed_byte, "lost": Path.unlink}
CHECKPOINT = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json"]


@pytest.mark.usefixtures("not_trained")
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [*CHECKPOINT, "run_id", "seal.json"])
def test_a_file_of_a_checkpoint_that_is_not_what_was_written(trained, tmp_path, name, kind):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    path = run / "checkpoint-2" / name
    DAMAGE[kind](path)
    said = resumed(run)
    if (name, kind) == ("seal.json", "lost"):  # as a kill leaves it: no checkpoint
        assert said == ""
        return
    lost = name != "seal.json" and kind in ("lost", "a folder", "a pipe")
    fault = "is missing" if lost else "is damaged"
    assert said == f"--resume {run}: {path} {fault}; remove {run / 'checkpoint-2'} to go on from checkpoint-1"


def test_a_seal_of_other_values(trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    path = run / "checkpoint-2" / "seal.json"
    for changed in with_values(json.loads(path.read_text())):
        path.write_text(json.dumps(changed))
        assert "seal.json is damaged; remove" in resumed(run)


def test_a_checkpoint_of_another_step(trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "summary.json").unlink()
    (run / "checkpoint-2").rename(run / "checkpoint-7")
    assert f"{run / 'checkpoint-7'} is of step 2; remove" in resumed(run)


def without_its_first_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def in_another_order(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::-1]))


CHANGES = [without_its_first_line, in_another_order, changed_byte]


@pytest.mark.parametrize("change", [*CHANGES, Path.unlink])
def test_records_are_those_of_the_checkpoint(trained, tmp_path, change):
    """Without the first of them, what is measured of a trained model would be told as what it was before."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    change(run / "metrics.jsonl")
    assert resumed(run) == ""
    before = read_lines(trained / "metrics.jsonl")[:-1]  # the last of them was of the end, which now comes later
    assert read_lines(run / "metrics.jsonl")[: len(before)] == before


@pytest.mark.usefixtures("not_trained")
@pytest.mark.parametrize("begun_anew", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_rows_that_a_run_goes_on_with(aligned, tmp_path, change, begun_anew):
    """Also where no checkpoint knows them any more."""
    run = Path(shutil.copytree(aligned, tmp_path / "run"))
    change(run / "rows.jsonl")
    for path in run.glob("checkpoint-*") if begun_anew else ():
        shutil.rmtree(path)
    rows = run / "rows.jsonl"
    assert f"{rows} is not what the run began with: put it back; or remove {rows}, to have" in resumed(run, "align")
    rows.unlink()
    assert resumed(run, "align") == ""  # the rows of the steps it began with
    assert rows.read_bytes() == (aligned / "rows.jsonl").read_bytes()


@pytest.mark.usefixtures("not_trained")
def test_rows_of_data_that_has_changed(aligned, start, tmp_path):
    run, data = Path(shutil.copytree(aligned, tmp_path / "run")), Path(start.data)
    (run / "rows.jsonl").unlink()
    files = sorted(path for path in data.rglob("*") if path.is_file()) if data.is_dir() else [data]
    before = {path: path.read_bytes() for path in files}
    try:
        for path in files:
            path.write_bytes(path.read_bytes()[::-1])
        assert "rows.jsonl was made anew, and is not what the run began with: give the --data" in resumed(run, "align")
    finally:
        for path, content in before.items():
            path.write_bytes(content)


@pytest.mark.usefixtures("not_trained")
def test_options_that_were_changed_in_the_file(trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    content = json.loads((run / "run.json").read_text())
    content["config"]["seed"] += 1
    (run / "run.json").write_text(json.dumps(content))
    with pytest.raises(LogitlessError, match=r"run.json does not hold .* put back what was there, or begin another"):
        stored(run, TrainConfig())


@pytest.mark.usefixtures("not_trained")
def test_an_empty_folder_in_a_whole_checkpoint(trained, tmp_path):
    """Of the name under which ranks keep their parts."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "checkpoint-2" / "sharded_state").mkdir()
    assert resumed(run) == ""


@pytest.mark.usefixtures("not_trained")
def test_tokens_that_a_run_goes_on_with(trained, micro, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    with np.load(run / "tokens.npz") as file:
        held = dict(file)
    name = max(held, key=lambda name: held[name].nbytes)
    np.savez(run / "tokens.npz", **{**held, name: held[name][::-1].copy()})
    assert f"{run / 'tokens.npz'} is not what the run began with" in resumed(run)
    (run / "tokens.npz").unlink()
    assert resumed(run) == ""  # made anew


def test_what_was_not_changed_goes_on(trained, tmp_path):
    assert resumed(Path(shutil.copytree(trained, tmp_path / "run"))) == ""


def test_a_run_of_another_version(trained, tmp_path):
    """Whose checkpoints have no seal, and would be taken for unfinished ones."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, "schema": 1}))
    assert "run.json has schema 1, expected 2" in resumed(run)
    assert (run / "checkpoint-2").exists()


def test_a_longer_run_that_was_killed_before_its_summary_is_finished(trained, tmp_path, monkeypatch):
    """The summary that lies there is of the shorter one, and a run without options goes on with the longer one's."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))

    def kill(*_, **__):
        raise LogitlessError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(sft, "save_model", kill)
        assert resumed(run) == "killed"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    sft.run(replace(stored(run, TrainConfig()), resume=run), QUIET)
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    assert "finished at step 3; raise --max-steps to train on" in resumed(run)


def test_an_alignment_on_another_number_of_ranks(aligned, tmp_path):
    """Its steps would be of another size."""
    run = Path(shutil.copytree(aligned, tmp_path / "run"))
    write_sealed(run / "run.json", {**read_sealed(run / "run.json"), "ranks": 2})
    assert "a step of this run is the batches of 2 ranks: launch as many, got 1" in resumed(run, "align")


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("command", ["train", "align"])
def test_adapters_go_on_with_the_model_that_they_began_beside(micro, start, tmp_path, command):
    """On another one they would be other weights."""
    model, place = Path(shutil.copytree(start.model, tmp_path / "model")), tmp_path / "run"
    config, module = (micro.config, sft) if command == "train" else (start, align)
    module.run(replace(config, model=str(model), lora_rank=2, max_steps=2, output_dir=place), QUIET)
    weights = load_file(model / "model.safetensors")
    save_file({name: 1.5 * x for name, x in weights.items()}, model / "model.safetensors", {"format": "pt"})
    said = f"--resume {place}: model.safetensors of --model {model} is not what the run began with: put it back, or"
    assert resumed(place, command).startswith(said)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert resumed(place, command) == ""


@pytest.mark.usefixtures("not_trained")
def test_a_configuration_that_has_changed(trained, micro, tmp_path):
    """Weights of the same shapes would be read by other rules."""
    run, before = Path(shutil.copytree(trained, tmp_path / "run")), Path(micro.config.model).read_text()
    try:
        Path(micro.config.model).write_text(json.dumps({**json.loads(before), "rope_theta": 77.0}))
        assert f"--model {micro.config.model} is not what the run began with" in resumed(run)
    finally:
        Path(micro.config.model).write_text(before)


def test_no_default_model_is_trained_for_a_run_that_goes_on(aligned, tmp_path, monkeypatch):
    """It would be another one than the run began with."""
    run = Path(shutil.copytree(aligned, tmp_path / "run"))
    known = read_sealed(run / "run.json")
    write_sealed(run / "run.json", {**known, "config": {**known["config"], "model": DEFAULT_MODEL}})
    monkeypatch.chdir(tmp_path)
    assert f"--model {DEFAULT_MODEL}: expected a directory with weights to align" in resumed(run, "align")
    assert not (tmp_path / "runs").exists()
