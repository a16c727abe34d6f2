"""Runs whose ranks share each sequence, launched by torchrun: the losses of one process, and clear refusals."""

import json
import shutil
from dataclasses import replace

import pytest
from rich.console import Console

from logitless.workbench.runs.checkpoints import last_checkpoint
from logitless.workbench.sft.run import run
from tests.workbench.sft.test_ranks import PER_STEP, STEPS, assert_lost, launch, options
from tests.workbench.sft.test_run import dense_held_out_loss, losses

QUIET = Console(quiet=True)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unmeasured")]


def alone(micro, place, **more) -> dict[int, float]:
    """The losses of one process."""
    run(replace(micro.config, batch_size=PER_STEP, max_steps=STEPS, output_dir=place, **more), QUIET)
    return losses(place)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_ranks_that_share_sequences_die_and_one_or_four_go_on(micro, tmp_path, sharding):
    """On two ranks to the end of step 6, then on one that has whole sequences, and on two pairs."""
    place = tmp_path / "run"
    given = options(micro, place, "--sharding", sharding, "--gradient-accumulation-steps", PER_STEP)
    status, written = launch(2, "KILL", 7, *given, "--context-parallel", 2, "--rank-timeout", 60)
    assert status != 0
    assert_lost(written)
    found = last_checkpoint(place)
    assert found is not None
    assert found[1] == 6
    shutil.copytree(place, tmp_path / "four")
    for ranks, context, where in ((4, 2, tmp_path / "four"), (1, 1, place)):
        status, written = launch(ranks, "train", "--resume", where, "--context-parallel", context)
        assert status == 0, written[-4000:]
    wanted = alone(micro, tmp_path / "alone")
    before = json.loads((tmp_path / "alone" / "summary.json").read_text())["held_out_loss_before"]
    for finished in (tmp_path / "four", place):
        assert losses(finished) == pytest.approx(wanted, rel=1e-4)
        summary = json.loads((finished / "summary.json").read_text())
        assert summary["tokens"] == STEPS * PER_STEP * micro.config.context_length
        assert summary["held_out_loss_before"] == pytest.approx(before, rel=1e-5)
        assert dense_held_out_loss(finished) == pytest.approx(summary["held_out_loss_after"], rel=1e-4)


@pytest.mark.parametrize(("sharding", "lora_rank"), [("ddp", 2), ("fsdp2", 0), ("fsdp2", 2)])
def test_all_that_makes_a_context_longer(micro, tmp_path, sharding, lora_rank):
    """Sparse attention, tiles, offloaded inputs and adapters: one process's losses."""
    more = ["--attention", "nsa", "--mlp-tiles", 3, "--gradient-checkpointing", "--offload-activations"]
    more += ["--sharding", sharding, "--lora-rank", lora_rank, "--gradient-accumulation-steps", PER_STEP]
    status, written = launch(2, *options(micro, tmp_path / "two", *more, "--context-parallel", 2))
    assert status == 0, written[-4000:]
    wanted = alone(micro, tmp_path / "one", attention="nsa", lora_rank=lora_rank)
    assert losses(tmp_path / "two") == pytest.approx(wanted, rel=1e-4)
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    assert two["held_out_loss_after"] == pytest.approx(one["held_out_loss_after"], rel=1e-4)


@pytest.mark.parametrize(
    ("more", "ranks", "message"),
    [
        (["--context-parallel", 3], 2, "--context-length must be a multiple of --context-parallel 3, such as 33"),
        (["--context-parallel", 2], 3, "expected a number of ranks that 2 divides, got 3; launch with torchrun"),
        (["--context-parallel", 2, "--attention", "eager"], 2, "--context-parallel 2 knows no --attention eager"),
        (
            ["--context-parallel", 2, "--context-length", 128, "--rope-scaling", "dynamic:2"],
            2,
            "--context-parallel: dynamic rotary embeddings depend on the longest position",
        ),
    ],
)
def test_every_rank_says_what_is_wrong(micro, tmp_path, more, ranks, message):
    status, written = launch(ranks, *options(micro, tmp_path / "run", *more), timeout=100)
    assert status != 0
    assert written.count("logitless: ") == ranks == written.count(message), written[-4000:]
