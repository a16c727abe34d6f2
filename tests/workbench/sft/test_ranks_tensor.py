"""Runs whose matrices are split over ranks, launched by torchrun: one process's losses, checkpoints for any layout."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from logitless.errors import OptionError
from logitless.workbench.common.files import read_lines
from logitless.workbench.runs.checkpoints import last_checkpoint
from logitless.workbench.runs.rundir import stored
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.mesh import Layout
from logitless.workbench.sft.run import run
from tests.support.workbench.micro import micro_directory
from tests.support.workbench.unmeasured import leave_unmeasured
from tests.workbench.sft.test_ranks import PER_STEP, QUIET, STEPS, launch, options
from tests.workbench.sft.test_run import dense_held_out_loss, losses

ROUNDING = 1e-4  # relative; with the gradients of one rank's heads alone for q_norm and k_norm, losses are 5e-4 off


@pytest.fixture(scope="module")
def four_heads(micro, tmp_path_factory):
    """The micro model with as many heads as the ranks that may share it."""
    place = tmp_path_factory.mktemp("four") / "model"
    model = micro_directory(place, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    return SimpleNamespace(model=model, data=micro.data, config=replace(micro.config, model=str(model)))


def curve(place: Path, name: str) -> dict[int, float]:
    return {r["step"]: r[name] for r in read_lines(place / "metrics.jsonl") if "loss" in r}


@pytest.fixture(scope="module")
def alone(four_heads, tmp_path_factory) -> Path:
    """A run of one process."""
    place = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        leave_unmeasured(patch)
        run(replace(four_heads.config, batch_size=PER_STEP, max_steps=STEPS, output_dir=place), QUIET)
    return place


@pytest.fixture(scope="module")
def killed(four_heads, tmp_path_factory) -> Path:
    """A run of two ranks that share matrices, killed in step 7."""
    place = tmp_path_factory.mktemp("killed") / "run"
    more = ["--tensor-parallel", 2, "--gradient-accumulation-steps", PER_STEP, "--gradient-checkpointing"]
    status, written = launch(2, "KILL", 7, *options(four_heads, place, *more))
    assert status != 0
    found = last_checkpoint(place)
    assert found is not None, written[-4000:]
    assert found[1] == 6
    return place


def summary(place: Path) -> dict:
    return json.loads((place / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ["--tensor-parallel", 1]),
        (2, []),
        (4, ["--tensor-parallel", 4]),
        (4, ["--sharding", "fsdp2"]),
        (4, ["--context-parallel", 2, "--sharding", "fsdp2"]),
        (4, ["--tensor-parallel", 1, "--sharding", "fsdp2"]),
        (2, ["--tensor-parallel", 1]),
    ],
    ids=[
        "one",
        "the same two",
        "over four",
        "over two, parts by FSDP2",
        "sequences as well",
        "by FSDP2 alone",
        "not at all, two ranks",
    ],
)
def test_split_on_two_ranks_and_gone_on_with_by_others(alone, killed, tmp_path, ranks, more):
    """Killed in mid-run and resumed by any layout, a run has the losses and gradients of one process."""
    place = tmp_path / "run"
    shutil.copytree(killed, place)
    status, written = launch(ranks, "train", "--resume", place, *more)
    assert status == 0, written[-4000:]
    assert written.count("training loss") == 1
    assert not re.search("UserWarning|While redistributing", written)  # of torch's own, from each rank
    assert losses(place) == pytest.approx(losses(alone), rel=ROUNDING)
    assert curve(place, "grad_norm") == pytest.approx(curve(alone, "grad_norm"), rel=ROUNDING)
    assert curve(place, "tokens") == curve(alone, "tokens")
    assert dense_held_out_loss(place) == pytest.approx(summary(place)["held_out_loss_after"], rel=ROUNDING)
    for name in ("held_out_loss_before", "held_out_loss_after"):
        assert summary(place)[name] == pytest.approx(summary(alone)[name], rel=ROUNDING)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_adapters_and_all_that_makes_a_context_longer(four_heads, tmp_path):
    """Split twice, over four ranks: matrices over two, and each part of them by FSDP2 over two."""
    light = ["--mlp-tiles", 3, "--gradient-checkpointing", "--offload-activations", "--lora-rank", 2]
    more = [*light, "--tensor-parallel", 2, "--sharding", "fsdp2", "--gradient-accumulation-steps", 2]
    status, written = launch(4, *options(four_heads, tmp_path / "four", *more))
    assert status == 0, written[-4000:]
    one = replace(four_heads.config, batch_size=4, lora_rank=2, max_steps=STEPS, output_dir=tmp_path / "one")
    alone = run(one, QUIET)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=ROUNDING)
    assert curve(tmp_path / "four", "grad_norm") == pytest.approx(curve(tmp_path / "one", "grad_norm"), rel=ROUNDING)
    again = replace(four_heads.config, model=str(tmp_path / "four" / "model"), max_steps=1, output_dir=tmp_path / "on")
    before = run(again, QUIET)["held_out_loss_before"]
    assert before == pytest.approx(alone["held_out_loss_after"], rel=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "ranks", "message"),
    [
        (["--tensor-parallel", 2], 2, "--tensor-parallel 2 must divide the model's num_key_value_heads, which is 1"),
        (["--tensor-parallel", 2], 3, "--tensor-parallel 2: expected a number of ranks that 2 divides, got 3"),
    ],
)
def test_every_rank_says_what_cannot_be_split(micro, tmp_path, more, ranks, message):
    config = micro_directory(tmp_path / "model")
    status, written = launch(ranks, *options(micro, tmp_path / "run", "--model", config, *more), timeout=100)
    assert status != 0
    assert written.count("logitless: ") == ranks == written.count(message)


@pytest.mark.slow
def test_a_silent_rank_is_given_up(four_heads, tmp_path):
    given = options(four_heads, tmp_path / "run", "--tensor-parallel", 2, "--rank-timeout", 15)
    status, written = launch(2, "STOP", 2, *given, timeout=150)
    assert status != 0
    assert "logitless: rank 0 lost another rank" in written, written[-4000:]


def test_layouts():
    config = TrainConfig(tensor_parallel=2, sharding="fsdp2")
    assert Layout.of(config, 8) == Layout(data=4, tensor=2, fsdp=True)
    both = Layout.of(replace(config, context_parallel=3), 12)
    assert (both.ranks, both.weights, both.sharing, both.data) == (12, 6, 6, 2)
    for ranks in (1, 3):
        with pytest.raises(OptionError, match=rf"--tensor-parallel 2: expected .* that 2 divides, got {ranks}; launch"):
            Layout.of(config, ranks)
    with pytest.raises(OptionError, match=r"--tensor-parallel 2 and --context-parallel 3: expected .* that 6 divides"):
        Layout.of(replace(config, context_parallel=3), 8)
    for context in (1, 2):
        with pytest.raises(OptionError, match="2 ranks hold the same part of each matrix, which needs --sharding"):
            Layout.of(TrainConfig(tensor_parallel=2, context_parallel=context), 4)
    assert [Layout(data=2, fsdp=fsdp).whole for fsdp in (False, True)] == [True, False]
    assert [Layout(data=2, context=n).shares for n in (1, 2)] == [False, True]


def test_whole_weights_do_not_go_on_in_parts(micro, tmp_path, unmeasured):
    place = tmp_path / "run"
    run(replace(micro.config, output_dir=place), QUIET)
    before = stored(place, TrainConfig())
    going_on = replace(before, resume=place, max_steps=12, sharding="fsdp2")
    with pytest.raises(OptionError, match="its checkpoints were made with whole weights on every rank; go on without"):
        run(going_on, QUIET)
    assert stored(place, TrainConfig()) == before
