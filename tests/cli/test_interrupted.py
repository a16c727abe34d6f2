"""Signals outside a run's own place: before it has one, while its results are shown."""

import signal
from pathlib import Path

import pytest

from logitless.cli.main import main
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.common.lock import release
from logitless.workbench.common.signals import STOPPING, interrupted_by_signals
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.runs.ending import Interrupted
from logitless.workbench.runs.rundir import claim, record
from logitless.workbench.scoring.config import ScoreConfig
from logitless.workbench.scoring.parts import Parts
from logitless.workbench.scoring.summary import finished
from logitless.workbench.sft.config import TrainConfig

COMMANDS = {
    ("train",): ("sft", TrainConfig()),
    ("align",): ("align", AlignConfig()),
    ("align", "--method", "all"): ("grade", GradeConfig(method="all").defaults()),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=STOPPING)
def stop(request):
    """What sends this process a signal, wherever it is called."""
    before = signal.getsignal(request.param)
    usual = signal.default_int_handler if request.param == signal.SIGINT else signal.SIG_DFL
    signal.signal(request.param, usual)  # also where the tests run under nohup, or in a script's background
    yield lambda *_: signal.raise_signal(request.param)
    signal.signal(request.param, before)


@pytest.mark.parametrize("command", COMMANDS)
def test_before_a_new_run_has_a_place(command, stop, monkeypatch, capsys):
    monkeypatch.setattr(f"logitless.workbench.{COMMANDS[command][0]}.run.run", stop)
    assert main(command) == 130
    assert capsys.readouterr().err == "interrupted; start again, nothing was trained yet\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_before_a_run_goes_on(command, stop, monkeypatch, capsys):
    module, config = COMMANDS[command]
    place = claim(config, "run")
    record(config, place)
    release(place)
    monkeypatch.setattr(f"logitless.workbench.{module}.run.run", stop)
    assert main([command[0], "--resume", str(place)]) == 130
    said = f"interrupted; logitless {command[0]} --resume runs/run goes on from the start\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("command", COMMANDS)
def test_while_its_results_are_shown(command, stop, monkeypatch, capsys):
    Path("metrics.jsonl").touch()
    summary = {"output_dir": ".", "method": "all"}
    monkeypatch.setattr(f"logitless.workbench.{COMMANDS[command][0]}.run.run", lambda *_: summary)
    monkeypatch.setattr(f"logitless.cli.{command[0]}.deliver", stop)
    assert main(command) == 130
    assert capsys.readouterr().err == "interrupted; the run has ended, and all of it is in .\n"


def test_while_a_file_is_written(stop, monkeypatch, capsys):
    def write(path, text):
        path.write_text(text[:10])
        stop()

    monkeypatch.setattr("logitless.workbench.common.files._write_text", write)
    assert main(["plan", "--json", "plan.json"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not list(Path().iterdir())


def test_while_the_parts_of_a_record_that_is_whole_are_removed(stop, monkeypatch):
    monkeypatch.setattr(Parts, "remove", stop)
    with interrupted_by_signals(), pytest.raises(Interrupted, match="the run has ended, and all of it is in out"):
        finished(ScoreConfig(data="text", out=Path("out")), Parts(Path("out")), {"out": "out"})


@pytest.mark.parametrize("told", ["", "two", "-1"])
def test_a_number_of_ranks_that_is_none(told, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", told)
    assert main(["align", "--method", "ste"]) == 2
    said = f"logitless: WORLD_SIZE={told!r} in the environment: expected a number of ranks; unset it, or use torchrun\n"
    assert capsys.readouterr().err == said
