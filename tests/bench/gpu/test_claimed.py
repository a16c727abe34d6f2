"""The project's own commands on a CUDA device that is claimed: what Python does on CUDA alone is executed."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench.gpu import extras
from bench.harness import read_lines
from logitless.vocab.backends.triton.tuned import table
from tests.support.workbench.micro import CONTEXT, micro_corpus, micro_directory

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, bench/gpu.sh extras runs them"),
]


def on_cuda(*arguments: object, status: int = 0) -> str:
    """What a module prints, which must end well."""
    return printed("tests.support.bench.on_claimed_cuda", *arguments, status=status)


def printed(*arguments: object, status: int = 0) -> str:
    """The same of a module that is run as it is."""
    command = [sys.executable, "-W", "ignore", "-m", *map(str, arguments)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == status, done.stderr[-2000:] + done.stdout[-2000:]
    return done.stdout


@pytest.mark.parametrize("options", [(), ("--gradient-checkpointing",)], ids=["profile", "stages"])
def test_a_profile(options):
    found = on_cuda(
        "logitless.cli", "profile", "--model", "tiny", "--context-length", 64, *options, "--real", "cuda", "--json", "-"
    )
    real = json.loads(found)["real"]
    assert real["device"] == "cuda"
    assert real["allocated_peak_bytes"] > 0


def test_memory_of_soft_tokens(tmp_path):
    out = tmp_path / "grade.jsonl"
    sizes = ("--hidden", 64, "--vocab", 301, "--steps", 2)
    on_cuda("bench.grade.run", "--part", "memory", *sizes, "--device", "cuda", "--out", out)
    assert all(row["allocated_mb"] > 0 for row in read_lines(out)[-1]["rows"])


def test_the_table_of_log_probs(tmp_path):
    out = tmp_path / "extras.jsonl"
    on_cuda("bench.gpu.run", "extras", "--tiny", "--parts", "logps", "--out", out)
    about, *rows = read_lines(out)
    assert about["device"] == "cuda"
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["grad_seconds"] > 0 for row in rows)


def test_the_benchmarks_table(tmp_path):
    """But for times, which are the interpreter's, and for peers, of which most want a real device.

    Weights that the kernel of the products writes are wrong here: the interpreter multiplies the bits of bf16 numbers.
    """
    out = tmp_path / "gpu.jsonl"
    same = ("table", "--tiny", "--rounds", 1, "--methods", "logitless,torch,torch.compile")
    written = on_cuda("bench.gpu.run", *same, "--rows", "loss,frozen,sample", "--out", out, status=1)
    about, device, *records = read_lines(out)
    assert (about["device"], device["name"]) == ("cuda", "NVIDIA GPU")
    assert set(device["failed"]) == {"clock"}
    status = {(r["case"], r["method"]): r["status"] for r in records}
    assert status.pop(("loss", "logitless, weights")) in ("wrong", "failed")
    assert status.pop(("loss", "logitless, QuACK")) == "absent"
    compiled = {key: status.pop(key) for key in list(status) if key[1] == "torch.compile"}  # for a device, if at all
    assert len(compiled) == 3
    assert set(status.values()) == {"ok"}, status
    assert ("sample", "logitless, CUDA graph") in status
    assert {r["dtype"] for r in records} == {"bfloat16"}
    faults = [line for line in written.splitlines() if line.startswith(("wrong:", "failed:", "not run:", "missed:"))]
    assert [line.partition(": ")[2][:24] for line in faults] == ["loss: logitless, weights"]


def test_tuning(tmp_path):
    out = tmp_path / "sizes.json"
    written = on_cuda("bench.gpu.run", "tune", "--tiny", "--out", out)
    sizes = json.loads(out.read_text())
    assert sizes["about"].startswith("NVIDIA GPU, by bench/gpu.sh tune")
    assert sizes["about"].endswith("products and fold in one kernel")
    assert set(sizes) == set(table("default"))
    assert "passed over" not in written


def test_a_part_of_the_check():
    """As `bench/gpu.sh check` runs it, in this process; all cases would take the interpreter an hour."""
    names = ("test_drawn[noise alone]", "in_a_cuda_graph", "any_width[2-whole rows]", "test_ties", "mean_logit-fp32")
    written = on_cuda("tests.support.vocab.triton_run", "--device", "cuda", *names)
    passed = [line for line in written.splitlines() if line.startswith("ok ")]
    assert len(passed) > len(names)
    assert "0 failed, 0 not run" in written


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    """Options that have a small vocabulary learned: the interpreter would need minutes for a real one."""
    root = tmp_path_factory.mktemp("micro")
    model, data = micro_directory(root / "model"), micro_corpus(root / "data")
    return "--model", model, "--data", data, "--context-length", CONTEXT, "--max-steps", 4


@pytest.mark.parametrize("loss", ["dense", "logitless"])
def test_training_goes_as_on_a_cpu_and_is_resumed(loss, micro, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "run", lambda clock, name, command: command[2:])
    (extra,) = [c for c in extras.training(extras.Clock(1.0), True, "cuda") if loss in c]
    there = json.loads(on_cuda(*extra, *micro, "--output-dir", tmp_path / "cuda"))
    here = json.loads(printed(*extra, *micro, "--output-dir", tmp_path / "cpu", "--device", "cpu"))
    assert (there["device"], there["dtype"], there["steps"], here["device"]) == ("cuda", "bfloat16", 4, "cpu")
    assert there["held_out_loss_after"] < there["held_out_loss_before"]
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)
    assert there["step_memory"][loss]["loss"] == pytest.approx(here["step_memory"][loss]["loss"], rel=1e-3)
    before = losses(tmp_path / "cuda")
    shutil.rmtree(tmp_path / "cuda" / "checkpoint-4")
    (tmp_path / "cuda" / "summary.json").unlink()
    on_cuda("logitless.cli", "train", "--resume", tmp_path / "cuda", "--json", "-")
    assert losses(tmp_path / "cuda") == before


def losses(run: Path) -> list[float]:
    """Of every step of a run, and of the held-out text before and after."""
    return [row.get("loss") or row["held_out_loss"] for row in read_lines(run / "metrics.jsonl")]
