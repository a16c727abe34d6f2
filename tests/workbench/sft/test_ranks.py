"""Runs on several ranks, launched by torchrun: the losses of one process, checkpoints for any number of ranks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from logitless.errors import OptionError
from logitless.workbench.runs.checkpoints import last_checkpoint
from logitless.workbench.runs.ranks import accumulation
from logitless.workbench.sft.run import run
from tests.support.integrations.launching import ROOT
from tests.support.workbench.micro import CONTEXT, micro_corpus, micro_directory
from tests.support.workbench.unmeasured import leave_unmeasured
from tests.workbench.sft.test_run import dense_held_out_loss, losses, resume, tensors

QUIET = Console(quiet=True)
STEPS, PER_STEP = 12, 8  # the corpus is gone through more than once


def launch(ranks: int, *arguments: object, timeout: int = 240, by: Sequence[object] = ()) -> tuple[int, str]:
    """Exit status and what the ranks wrote; by: another launcher than torchrun."""
    by = by or ("torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    command = [sys.executable, "-m", *map(str, by), "-m"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [*command, "tests.support.workbench.launched", *map(str, arguments)],
        cwd=ROOT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        written, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        written, _ = process.communicate(timeout=60)
        raise AssertionError(f"no end within {timeout} s\n{written[-4000:]}") from None
    return process.returncode, written


def assert_lost(written: str) -> None:
    """Rank 0 says that it lost another, by its own or by the launcher's finding, whichever was first."""
    said = "(logitless: rank 0 lost another rank|interrupted; rank 0 was ended by its launcher)"
    assert re.search(said, written), written[-4000:]


def options(micro, place: Path, *more: object) -> list[object]:
    fixed = ["train", "--model", micro.model, "--data", micro.data, "--context-length", CONTEXT, "--device", "cpu"]
    fixed += ["--learning-rate", 1e-2, "--loss", "logitless", "--max-steps", STEPS, "--batch-size", 1]
    return [*fixed, "--output-dir", place, *more]


@pytest.fixture(scope="module")
def alone(micro, tmp_path_factory) -> dict[int, float]:
    """The losses of one process."""
    place = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        leave_unmeasured(patch)
        run(replace(micro.config, batch_size=PER_STEP, max_steps=STEPS, output_dir=place), QUIET)
    return losses(place)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_ranks_one_dies_and_one_or_four_go_on(micro, alone, tmp_path, sharding):
    """Killed in mid-run and resumed on other numbers of ranks, a run has the losses of one process."""
    place = tmp_path / "run"
    given = options(micro, place, "--sharding", sharding, "--gradient-accumulation-steps", PER_STEP // 2)
    start = time.monotonic()
    status, written = launch(2, "KILL", 7, *given, "--rank-timeout", 60)
    assert status != 0
    assert time.monotonic() - start < 150
    assert_lost(written)
    assert f"--resume {place} goes on from step 6" in " ".join(written.split())
    found = last_checkpoint(place)
    assert found is not None
    assert found[1] == 6
    shutil.copytree(place, tmp_path / "four")
    status, written = launch(4, "train", "--resume", tmp_path / "four")
    assert status == 0, written[-4000:]
    assert written.count("training loss") == 1  # one summary, not one per rank
    resume(place)
    for finished in (tmp_path / "four", place):
        assert losses(finished) == pytest.approx(alone, rel=1e-4)
        summary = json.loads((finished / "summary.json").read_text())
        assert dense_held_out_loss(finished) == pytest.approx(summary["held_out_loss_after"], rel=1e-4)
        assert "lm_head.weight" not in tensors(finished)  # which is the embedding, however it was gathered


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_launch_that_is_stopped_has_interrupted_ranks(micro, alone, tmp_path, name):
    place = tmp_path / "run"
    given = options(micro, place, "--gradient-accumulation-steps", PER_STEP // 2)
    _, written = launch(2, name, 7, *given, "--rank-timeout", 60)
    said = " ".join(written.split())
    for rank in range(2):
        assert f"interrupted; rank {rank} was ended by its launcher (SIG{name}), as" in said, written[-4000:]
    assert f"--resume {place} goes on from step 6" in said
    assert "logitless: " not in written
    resume(place)
    assert losses(place) == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_all_that_makes_a_context_longer_on_two_ranks(micro, tmp_path, lora_rank):
    """Sparse attention, tiles, offloaded inputs and adapters, divided by FSDP2: one process's losses and weights."""
    light = ["--attention", "nsa", "--mlp-tiles", 3, "--gradient-checkpointing", "--offload-activations"]
    more = [*light, "--sharding", "fsdp2", "--gradient-accumulation-steps", 2, "--lora-rank", lora_rank]
    status, written = launch(2, *options(micro, tmp_path / "two", *more))
    assert status == 0, written[-4000:]
    one = replace(micro.config, attention="nsa", batch_size=4, lora_rank=lora_rank, max_steps=STEPS)
    alone = run(replace(one, output_dir=tmp_path / "one"), QUIET)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    again = replace(micro.config, model=str(tmp_path / "two" / "model"), max_steps=1, output_dir=tmp_path / "again")
    before = run(again, QUIET)["held_out_loss_before"]
    assert before == pytest.approx(alone["held_out_loss_after"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_fewer_sequences_than_a_step_has(micro, tmp_path, sharding):
    """None counts twice, although ranks must have as many as each other: what one of them lacks has no label."""
    data = micro_corpus(tmp_path / "few", 6)
    given = options(micro, tmp_path / "three", "--data", data, "--batch-size", 2, "--sharding", sharding)
    status, written = launch(3, *given)
    assert status == 0, written[-4000:]
    one = replace(micro.config, data=str(data), batch_size=6, max_steps=STEPS, output_dir=tmp_path / "one")
    run(one, QUIET)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "ranks", "message"),
    [
        (["--context-length", 128], 2, "positions up to 64"),
        (["--data", "nowhere"], 2, "no such file"),
        (["DIFFER", "--seed=3"], 2, "ranks disagree on seed: 0 on rank 0, 3 on rank 1"),
        (["DIFFER", "transformers=5.0"], 2, "5.0 on rank 1; start all with the same installation"),
        (["DIFFER", "--model=WIDER"], 2, "ranks disagree on vocabulary: (259, 259) on rank 0, (300, 259) on rank 1"),
        (["DIFFER", "--data=nowhere"], 2, "ranks disagree on data"),
        (["DIFFER", "--model=nowhere.json"], 2, "(rank 1 of 2)"),
    ],
)
def test_every_rank_says_what_is_wrong(micro, tmp_path, more, ranks, message):
    given = options(micro, tmp_path / "run")
    more = [x.replace("WIDER", str(micro_directory(tmp_path / "wider", vocab_size=300))) for x in map(str, more)]
    status, written = launch(ranks, *([*more, *given] if more[0] == "DIFFER" else [*given, *more]), timeout=100)
    assert status != 0
    assert written.count("logitless: ") == ranks == written.count(message)


@pytest.mark.slow
def test_a_silent_rank_is_given_up(micro, tmp_path):
    status, written = launch(2, "STOP", 2, *options(micro, tmp_path / "run", "--rank-timeout", 8), timeout=150)
    assert status != 0
    assert "logitless: rank 0 lost another rank" in written, written[-4000:]


@pytest.mark.slow
def test_ranks_without_a_gpu_find_each_other(micro, tmp_path):
    """Where no device is asked for, as everywhere else."""
    given = options(micro, tmp_path / "run")
    at = given.index("--device")
    status, written = launch(2, *given[:at], *given[at + 2 :])
    assert status == 0, written[-4000:]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ranks"] == 2


def test_a_step_is_shared_evenly():
    assert [accumulation(8, 2, ranks) for ranks in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(OptionError, match=r"8 sequences, which 3 ranks with 2 at a time .* that divides 4"):
        accumulation(8, 2, 3)
    with pytest.raises(OptionError, match=r"8 sequences, which 2 ranks with 3 at a time .* that divides 2$"):
        accumulation(8, 3, 2)
    with pytest.raises(OptionError, match=r"3 groups of 2 ranks .* that divides 8 and is a multiple of 2$"):
        accumulation(8, 2, 3, 2)
    for sharing, message in ((1, "2 ranks with 8 .*: launch 1 rank$"), (2, "2 groups of 2 ranks .*: launch 2 ranks$")):
        with pytest.raises(OptionError, match=message):
            accumulation(8, 8, 2, sharing)
