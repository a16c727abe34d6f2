"""Runs whose files were cut short: resumed where that is exact, refused in one line that says what to do otherwise."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from logitless.errors import ConfigError, DataError, LogitlessError
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.common.files import read_lines
from logitless.workbench.runs.rundir import stored
from logitless.workbench.sft import run as sft
from logitless.workbench.sft.config import TrainConfig
from tests.support.workbench.unmeasured import leave_unmeasured

QUIET = Console(quiet=True)
pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(scope="module")
def whole(micro, tmp_path_factory) -> Path:
    """A run of four steps, killed before its summary."""
    place = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        leave_unmeasured(patch)
        sft.run(replace(micro.config, max_steps=4, output_dir=place), QUIET)
    (place / "summary.json").unlink()
    return place


@pytest.fixture
def place(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def resume(place: Path) -> dict:
    return sft.run(replace(stored(place, TrainConfig()), resume=place), QUIET)


def cut(path: Path, by: int = 20) -> None:
    path.write_bytes(path.read_bytes()[:-by])


@pytest.mark.parametrize("by", [0, 20])
def test_the_last_record_is_written_once_and_whole(place, by):
    records = place / "metrics.jsonl"
    before = read_lines(records)
    if by:
        cut(records, by)
    resume(place)
    assert [r.get("final") for r in read_lines(records)] == [r.get("final") for r in before]
    assert records.read_text().count("\n") == len(before)
    assert read_lines(records)[-1]["held_out_loss"] == pytest.approx(before[-1]["held_out_loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_that_was_cut_short(place, name):
    cut(place / "checkpoint-4" / name)
    with pytest.raises(ConfigError, match=rf"{name} is damaged; remove .*checkpoint-4 to go on from checkpoint-3"):
        resume(place)
    shutil.rmtree(place / "checkpoint-4")
    assert resume(place)["steps"] == 4


def test_a_checkpoint_that_was_not_finished_is_not_gone_back_from_silently(place, capsys):
    """A state that was cut short is what a kill leaves: the one before is taken, and said."""
    cut(place / "checkpoint-4" / "trainer_state.json")
    sft.run(replace(stored(place, TrainConfig()), resume=place), Console(stderr=True))
    assert "going on from step 3" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_that_lost_a_file(place, name):
    """Trainer itself goes on with a new optimizer, a new schedule or other random numbers, and says nothing."""
    (place / "checkpoint-4" / name).unlink()
    with pytest.raises(
        ConfigError, match=r"checkpoint-4/[a-z_*]+\.[a-z]+ is missing; remove .* go on from checkpoint-3"
    ):
        resume(place)


def test_a_checkpoint_that_lost_a_tensor(place):
    weights = place / "checkpoint-4" / "model.safetensors"
    found = load_file(weights)
    del found["model.norm.weight"]
    save_file(found, weights)
    with pytest.raises(ConfigError, match=r"--resume .*: its weights lack model.norm.weight"):
        resume(place)


def test_a_checkpoint_whose_adapter_lost_a_tensor(micro, tmp_path):
    """PEFT itself goes on with an adapter that is partly new."""
    sft.run(replace(micro.config, max_steps=2, lora_rank=2, output_dir=tmp_path), QUIET)
    (tmp_path / "summary.json").unlink()
    (weights,) = tmp_path.glob("checkpoint-2/adapter_model.safetensors")
    found = load_file(weights)
    lost = next(name for name in found if "lora_B" in name)
    del found[lost]
    save_file(found, weights)
    with pytest.raises(ConfigError, match=rf"--resume .*: its weights lack {lost}, which its adapter_config.json asks"):
        resume(tmp_path)


@pytest.mark.parametrize("name", ["tokens.npz", "step_memory.json"])
def test_a_file_that_can_be_made_anew(place, name):
    cut(place / name, 40)
    with pytest.raises(
        DataError, match=rf"{name} does not hold what was written there \(.*\): delete it, and --resume makes it anew"
    ):
        resume(place)
    (place / name).unlink()
    assert resume(place)["steps"] == 4


@pytest.mark.parametrize("line", ["", "\0\0", "5"])
def test_a_damaged_record(place, line):
    records = place / "metrics.jsonl"
    first, *rest = records.read_text().splitlines()
    records.write_text("\n".join([first, line, *rest, ""]))
    with pytest.raises(DataError, match=r"metrics.jsonl:2: expected a record in JSON, got a damaged line; remove it"):
        resume(place)


def test_a_run_of_another_command_or_version(place):
    with pytest.raises(ConfigError, match=r"expected a run of this command and version; .*run.json: unknown option"):
        stored(place, AlignConfig())


class Code:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize("held", [{}, [1], "text", {"state": 3, "param_groups": []}, Code()], ids=type)
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_a_checkpoint_that_holds_something_else(place, name, held, capsys):
    """Refused in one line, unless it means nothing to the run; and no code in it runs."""
    path = place / "checkpoint-4" / name
    if name.endswith(".json"):
        path.write_text(path.read_text().replace("{", '{"unknown": 1,', 1))
    else:
        torch.save(held, path)
    run = replace(stored(place, TrainConfig()), resume=place, max_steps=5)
    said = ""
    try:
        sft.run(run, QUIET)
    except LogitlessError as error:
        said = str(error)
    assert "\n" not in said
    assert str(place / "checkpoint-4") in said or held == {} or name == "scheduler.pt"
    assert "ran" not in capsys.readouterr().out
