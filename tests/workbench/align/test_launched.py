"""`logitless align` by the launchers that people use."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from logitless.workbench.common.files import read_lines
from tests.support.integrations.tiny import TINY
from tests.support.workbench.micro import micro_directory
from tests.support.workbench.processes import finished, flags
from tests.workbench.sft.test_ranks import launch

ALIGN = ("logitless.cli", "align")
pytestmark = pytest.mark.slow


def steps(place):
    return [record["step"] for record in read_lines(place / "metrics.jsonl") if "loss" in record]


@pytest.mark.parametrize("method", ["intuitor", "dpo"])
def test_torchrun_with_two_ranks(start, tmp_path, method):
    """Two gloo ranks: one run, one summary, twice the completions or pairs."""
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", *ALIGN)
    options = flags(replace(start, method=method, max_steps=3))
    out = finished(*launch, *options, "--output-dir", tmp_path / "two")
    assert out.count("held-out rows:") == 1
    assert steps(tmp_path / "two") == [1, 2, 3]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model=nowhere.json"], "(rank 1 of 2)"),
        (["--max-steps=2"], "ranks disagree on max_steps: 1 on rank 0, 2 on rank 1"),
        (["transformers=5.0"], "5.0 on rank 1; start all with the same installation"),
        ([], "no such file or directory"),
    ],
)
def test_every_rank_says_what_is_wrong(start, tmp_path, more, message):
    """A text that is not there, too, which the first rank alone reads."""
    data = start.data if more else str(tmp_path / "nowhere")
    given = ["align", *flags(replace(start, data=data, max_steps=1)), "--output-dir", tmp_path / "run"]
    status, written = launch(2, *(["DIFFER", *more] if more else []), *given)
    assert status != 0
    assert written.count("logitless: ") == written.count(message) == 2, written[-4000:]
    assert not (tmp_path / "run" / "run.json").exists()


def test_ranks_that_divide_the_model(start, tmp_path):
    """They learn and save what ranks do that hold all of it each, adapters merged too."""
    options = flags(replace(start, method="dpo", max_steps=3, lora_rank=2))
    for name, module in (("whole", ALIGN[:1]), ("divided", ("tests.support.workbench.divided",))):
        launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", *module, "align")
        finished(*launch, *options, "--output-dir", tmp_path / name)
    for file in ("model/model", "adapter/adapter_model"):
        whole, divided = (load_file(tmp_path / name / f"{file}.safetensors") for name in ("whole", "divided"))
        assert divided.keys() == whole.keys()
        for key, tensor in whole.items():
            torch.testing.assert_close(divided[key], tensor, rtol=1e-3, atol=1e-5)
    summaries = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "divided"))
    whole, divided = ([x[key] for key in ("parameters", "trainable_parameters", "device")] for x in summaries)
    assert divided == whole


@pytest.mark.parametrize("method", ["grpo", "dpo"])
def test_two_ranks_of_a_model_with_a_tower(start, tmp_path, method):
    """Which has no gradient where there is text alone, under checkpointed layers neither."""
    micro_directory(tmp_path / "model")
    TINY["gemma3-vision"].build(259).save_pretrained(tmp_path / "model")
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", *ALIGN)
    given = {"rewards": None, "repetition_guard": None, "max_steps": 2, "gradient_checkpointing": True}
    options = flags(replace(start, method=method, model=str(tmp_path / "model"), **given))
    finished(*launch, *options, "--output-dir", tmp_path / "two")
    assert steps(tmp_path / "two") == [1, 2]


def test_accelerate_launch(start, tmp_path):
    """One process, the most that accelerate's launcher starts on processors by itself; options from a file."""
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in start.to_dict().items() if value is not None))
    launch = (
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        1,
        "--num_machines",
        1,
        "--mixed_precision",
        "no",
    )
    out = finished(*launch, "--dynamo_backend", "no", "-m", *ALIGN, "--config", path, "--output-dir", tmp_path / "run")
    assert out.count("held-out rows:") == 1
    assert steps(tmp_path / "run") == [1, 2, 3, 4]
