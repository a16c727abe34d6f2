"""`--report-to`: what each tracker's own files hold after a run; `make test-trackers` brings the trackers."""

import json
import os
import shutil
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console
from transformers import Qwen3ForSequenceClassification, TrainerCallback
from transformers.integrations import integration_utils

from logitless.cli.main import main
from logitless.workbench.common.files import read_lines
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.runs.trackers import check_tracker, project
from logitless.workbench.sft.run import run
from tests.support.workbench.micro import micro_model
from tests.support.workbench.processes import finished, flags

# Of each command what it sends, by the names of the tracker's file and of metrics.jsonl.
TRAINERS = ("loss", "self_certainty/mean", "memory/peak_bytes", "memory/dense_would_need_bytes", "reward", "kl")
SENT = {
    "intuitor": {f"train/{name}": name for name in TRAINERS},
    "ste": {name: name for name in ("train/reward", "train/kl", "grad_norm", "tau", "peak_memory_bytes")},
    "train": {f"train/{name}": name for name in ("loss", "grad_norm", "learning_rate")},
}
BLOCK, WHOLE, FIRST, LAST = 2**15, 1, 2, 4


def tensorboard(place: Path, names: Sequence[str]) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = {path.parent for path in (place / "tensorboard").rglob("events.*")}
    every = [EventAccumulator(str(folder)).Reload() for folder in folders]
    (events,) = [one for one in every if names[0] in one.Tags()["scalars"]]
    return {name: [event.value for event in events.Scalars(name)] for name in names}


def trackio(place: Path, names: Sequence[str]) -> dict[str, list[float]]:
    (path,) = (place / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
    rows = [row for row in rows if names[0] in row]
    return {name: [row[name] for row in rows] for name in names}


def wandb(place: Path, names: Sequence[str]) -> dict[str, list[float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = place.glob("wandb/offline-run-*/*.wandb")
    found = [Record.FromString(data).history.item for data in records_of(path.read_bytes())]
    rows = [{".".join(item.nested_key) or item.key: item.value_json for item in items} for items in found]
    rows = [row for row in rows if names[0] in row]
    return {name: [json.loads(row[name]) for row in rows] for name in names}


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format behind a header of 7 bytes: blocks of 32 KiB, records in fragments."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts = (b"" if kind in (WHOLE, FIRST) else parts) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            yield parts


def options_of(what: str, start, micro, tmp_path: Path) -> list[str]:
    """A run of three steps."""
    if what == "train":
        return ["train", *flags(replace(micro.config, max_steps=3))]
    if what == "intuitor":
        return ["align", *flags(replace(start, max_steps=3))]
    reward = tmp_path / "reward"
    shutil.copytree(start.model, reward, ignore=shutil.ignore_patterns("*.safetensors"))
    config = micro_model().config
    config.num_labels, config.pad_token_id = 2, 0
    Qwen3ForSequenceClassification(config).save_pretrained(reward)
    small = GradeConfig(model=start.model, data=start.data, reward_model=str(reward), prompt_length=12, top_k=20)
    small = replace(small, completion_length=4, gradient_accumulation_steps=1, max_steps=3, device="cpu")
    return ["align", *flags(replace(small, evaluation_prompts=4, variance_samples=0)), "--method", what]


@pytest.mark.slow
@pytest.mark.parametrize("read", [tensorboard, trackio, wandb], ids=lambda read: read.__name__)
@pytest.mark.parametrize("what", SENT)
def test_the_metrics_arrive(start, micro, tmp_path, read: Callable[..., dict[str, list[float]]], what):
    name = read.__name__
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make test-trackers")
    files = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard"), "TRACKIO_DIR": str(tmp_path / "trackio")}
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [*options_of(what, start, micro, tmp_path), "--report-to", name]
    finished("logitless.cli", *command, "--output-dir", tmp_path / "run", **files, **offline)
    key = next(iter(SENT[what].values()))
    records = [record for record in read_lines(tmp_path / "run" / "metrics.jsonl") if key in record]
    found = read(tmp_path, list(SENT[what]))
    assert len(records) == 3
    for sent, recorded in SENT[what].items():
        assert found[sent] == pytest.approx([record[recorded] for record in records], rel=1e-6), sent
    if what == "train":
        assert read(tmp_path, ["eval/loss"])["eval/loss"] == pytest.approx(held_out_losses(tmp_path / "run"), rel=1e-6)


def held_out_losses(place: Path) -> list[float]:
    """Before the first step and after the last."""
    found = [x["held_out_loss"] for x in read_lines(place / "metrics.jsonl") if "held_out_loss" in x]
    assert len(found) == 2
    return found


@pytest.fixture
def tracker(monkeypatch) -> list[tuple[str, float | None]]:
    """What a tracker in wandb's place is told, in order."""
    told = []

    class Told(TrainerCallback):
        def on_train_begin(self, *_, **__):
            told.append(("begin", None))

        def on_log(self, *_, logs, **__):
            told.extend((name, logs[name]) for name in ("loss", "eval_loss") if name in logs)

        def on_train_end(self, *_, **__):
            told.append(("end", None))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Told)
    monkeypatch.setattr("logitless.workbench.runs.trackers.find_spec", lambda name: name)
    monkeypatch.setattr("logitless.workbench.runs.trackers.log_in", lambda: None)
    monkeypatch.setenv("WANDB_PROJECT", "")  # which is put back as it was
    return told


def test_the_held_out_loss_is_sent_while_the_tracker_runs(tracker, micro, tmp_path, unmeasured):
    run(replace(micro.config, max_steps=2, report_to="wandb", output_dir=tmp_path / "run"), Console(quiet=True))
    assert [name for name, _ in tracker] == ["begin", "eval_loss", "loss", "loss", "eval_loss", "end"]
    assert [value for name, value in tracker if name == "eval_loss"] == held_out_losses(tmp_path / "run")


@pytest.mark.parametrize("command", ["train", "align"])
def test_a_tracker_that_does_not_start_is_one_line(tracker, micro, start, tmp_path, monkeypatch, capsys, command):
    def refuse(*_, **__):
        raise RuntimeError("No API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(integration_utils.INTEGRATION_TO_CALLBACK["wandb"], "on_train_begin", refuse)
    monkeypatch.setattr("logitless.workbench.sft.run.measure", lambda config, tokens: {})
    config = replace(micro.config if command == "train" else start, report_to="wandb", output_dir=tmp_path / "run")
    assert main([command, *flags(config)]) == 2
    error = capsys.readouterr().err
    assert error.endswith("logitless: --report-to wandb: No API key configured. Use `wandb login`.\n")
    assert "Traceback" not in error


def test_a_login_is_asked_for_before_anything_is_read(tracker, monkeypatch, capsys, micro, tmp_path):
    def refuse():
        raise RuntimeError("No API key configured.")

    monkeypatch.setattr("logitless.workbench.runs.trackers.log_in", refuse)
    monkeypatch.delenv("WANDB_PROJECT")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = replace(micro.config, report_to="wandb", output_dir=tmp_path / "run")
    assert main(["train", *flags(config)]) == 2
    assert capsys.readouterr().err == "logitless: --report-to wandb: No API key configured.\n"
    assert not config.output_dir.exists()
    assert os.environ["WANDB_PROJECT"] == "logitless"  # for transformers' callback


def test_no_login_is_asked_for_where_runs_stay_on_this_machine(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("logitless.workbench.runs.trackers.log_in", lambda: pytest.fail("asked for a login"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    check_tracker("wandb")
    assert os.environ["WANDB_PROJECT"] == "mine"


def test_runs_are_in_a_project_of_our_name_unless_the_environment_says_otherwise(monkeypatch):
    for name in ("wandb", "trackio"):
        monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
        assert project(name) == "logitless"
        monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
        assert project(name) == "mine"


@pytest.mark.parametrize("command", [["train"], ["align"], ["align", "--method", "ste"], ["align", "--method", "all"]])
def test_a_tracker_that_is_not_there_is_one_line(command, monkeypatch, capsys):
    monkeypatch.setattr("logitless.workbench.runs.trackers.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert main([*command, "--report-to", "wandb"]) == 2
    assert capsys.readouterr().err.endswith("--report-to wandb needs it installed: pip install wandb\n")
