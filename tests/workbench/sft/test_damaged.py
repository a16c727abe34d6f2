"""Runs whose files were cut short: resumed where that is exact, refused in one line that says what to do otherwise."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from torch.distributed.checkpoint.api import CheckpointException

from logitless.errors import ConfigError, DataError
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.common.files import read_lines
from logitless.workbench.runs.rundir import stored
from logitless.workbench.sft import run as sft
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.sharded import checkpointing
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


def test_a_checkpoint_that_was_cut_short(place):
    cut(place / "checkpoint-4" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"safetensors is damaged; remove .*checkpoint-4 to go on from checkpoint-3"):
        resume(place)
    shutil.rmtree(place / "checkpoint-4")
    assert resume(place)["steps"] == 4


def test_a_checkpoint_that_was_not_finished_is_not_gone_back_from_silently(place, capsys):
    """One without a seal is what a kill leaves: the one before is taken, and said."""
    (place / "checkpoint-4" / "seal.json").unlink()
    sft.run(replace(stored(place, TrainConfig()), resume=place), Console(stderr=True))
    assert "going on from step 3" in capsys.readouterr().err.splitlines()


def test_a_file_that_can_be_made_anew(place):
    cut(place / "step_memory.json", 40)
    with pytest.raises(
        DataError,
        match=r"step_memory.json does not hold what was written there \(.*\): delete it, and --resume makes it",
    ):
        resume(place)
    (place / "step_memory.json").unlink()
    assert resume(place)["steps"] == 4


def test_a_run_of_another_command_or_version(place):
    with pytest.raises(ConfigError, match=r"expected a run of this command and version; .*run.json: unknown option"):
        stored(place, AlignConfig())


def test_what_fails_while_a_sharded_checkpoint_is_written_is_raised_as_it_is():
    """torch wraps it into what is no Exception, which nobody would turn into a line."""
    full = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"), checkpointing():
        raise CheckpointException("write", {1: (full, None)})
