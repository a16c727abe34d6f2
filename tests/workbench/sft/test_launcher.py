"""Ranks by accelerate's launcher: it starts them, and what they compute is said by the run's own options alone."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from logitless.errors import OptionError
from logitless.workbench.common.written import RUN_FILE
from logitless.workbench.runs.ending import how_to_go_on
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.launcher import by_options_alone
from logitless.workbench.sft.run import run
from tests.support.workbench.micro import micro_model
from tests.workbench.sft.test_ranks import PER_STEP, QUIET, STEPS, launch, options
from tests.workbench.sft.test_run import losses

LAUNCHER = ["accelerate.commands.launch", "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]


@pytest.mark.parametrize(
    ("sharding", "told", "message"),
    [
        (
            "ddp",
            {"ACCELERATE_USE_FSDP": "true"},
            "use_fsdp true, .* use_fsdp false; or add --sharding fsdp2",
        ),
        (
            "fsdp2",
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
            "fsdp_version 1, .* with fsdp_version 2",
        ),
        ("fsdp2", {"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params true"),
        ("fsdp2", {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "--gradient-checkpointing does it"),
        (
            "ddp",
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            "mixed_precision bf16, .*ion no; --mixed-precision bf16 is this command's own",
        ),
        ("ddp", {"ACCELERATE_USE_DEEPSPEED": "true"}, "use_deepspeed true, .*; --sharding fsdp2 divides the model"),
        ("ddp", {"ACCELERATE_USE_MEGATRON_LM": "true"}, "use_megatron_lm true, .*; --sharding fsdp2 divides the model"),
        ("ddp", {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "use_parallelism_config true"),
        ("ddp", {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend inductor, .* dynamo_backend no"),
    ],
)
def test_what_the_options_do_not_say_is_refused(monkeypatch, sharding, told, message):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=message):
        by_options_alone(TrainConfig(sharding=sharding))


def test_accelerate_sees_no_plugin_of_its_launchers(monkeypatch):
    told = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_DYNAMO_BACKEND": "NO"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with by_options_alone(TrainConfig(sharding="fsdp2")):
        assert os.environ["ACCELERATE_USE_FSDP"] == "false"
        assert "FSDP_VERSION" not in os.environ
    assert {name: os.environ[name] for name in told} == told


@pytest.mark.parametrize(
    ("ranks", "here", "command"),
    [
        (1, 1, "logitless train --resume"),
        (4, 4, "torchrun --nproc-per-node 4 -m logitless.cli train --resume"),
        (16, 8, "on every machine the same launch of -m logitless.cli train --resume"),
    ],
)
def test_a_launch_is_named_as_it_was(monkeypatch, tmp_path, ranks, here, command):
    (tmp_path / RUN_FILE).touch()
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    assert how_to_go_on(tmp_path, "train") == f"{command} {tmp_path} goes on from the start"


@pytest.fixture(scope="module")
def pretrained(micro, tmp_path_factory) -> Path:
    """A directory with weights."""
    place = tmp_path_factory.mktemp("pretrained")
    shutil.copytree(micro.model.parent, place, dirs_exist_ok=True)
    micro_model().save_pretrained(place)
    return place


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("told_by", ["flags", "file"])
def test_fsdp2_of_a_checkpoint(micro, pretrained, tmp_path, told_by):
    """What the launcher says of FSDP and what the run does are one: the losses of one process."""
    launcher = [*LAUNCHER, "--use_fsdp", "--fsdp_version", 2, "--num_processes", 2, "--main_process_port", 0]
    if told_by == "file":
        fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": False}
        told = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": fsdp}
        told |= {"num_processes": 2, "num_machines": 1, "machine_rank": 0, "mixed_precision": "no", "use_cpu": False}
        path = tmp_path / "accelerate.json"
        path.write_text(json.dumps({**told, "main_process_port": 0}))
        launcher = [LAUNCHER[0], "--config_file", path]
    source = SimpleNamespace(model=pretrained, data=micro.data)
    more = ["--sharding", "fsdp2", "--gradient-accumulation-steps", PER_STEP // 2]
    status, written = launch(2, *options(source, tmp_path / "two", *more), by=launcher)
    assert status == 0, written[-4000:]
    assert written.count("training loss") == 1
    one = replace(micro.config, model=str(pretrained), batch_size=PER_STEP, max_steps=STEPS)
    run(replace(one, output_dir=tmp_path / "one"), QUIET)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.slow
def test_data_parallel_ranks(micro, tmp_path):
    launcher = [*LAUNCHER, "--multi_gpu", "--num_processes", 2, "--main_process_port", 0]
    status, written = launch(2, *options(micro, tmp_path / "run"), by=launcher)
    assert status == 0, written[-4000:]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ranks"] == 2


@pytest.mark.slow
def test_what_the_launcher_asks_for_and_the_options_do_not(micro, tmp_path):
    launcher = [*LAUNCHER, "--use_fsdp", "--num_processes", 2, "--main_process_port", 0]
    status, written = launch(2, *options(micro, tmp_path / "run"), by=launcher)
    assert status != 0
    assert written.count("logitless: accelerate was told use_fsdp true") == 2, written[-4000:]
