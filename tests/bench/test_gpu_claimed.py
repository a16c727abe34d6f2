"""The project's own commands on a CUDA device that is claimed: what Python does on CUDA alone is executed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench.harness import read_lines

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, bench/gpu.sh extras runs them"),
]


def on_cuda(*arguments: object) -> str:
    """What a module prints, which must end well."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.bench.on_claimed_cuda", *map(str, arguments)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
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
    on_cuda("bench.grade", "--part", "memory", *sizes, "--device", "cuda", "--out", out)
    assert all(row["allocated_mb"] > 0 for row in read_lines(out)[-1]["rows"])
