"""The tests in `on_device` run every kernel, and each of its switches both on and off."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from logitless.sample import sample_tokens
from logitless.vocab.backends import triton

BACKENDS = Path(triton.__file__).parent
SAMPLE = Path(sys.modules[sample_tokens.__module__].__file__).with_name("triton_draw.py")

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter tells which options a kernel had")
def test_every_kernel_and_option_is_run(tmp_path):
    """In a process of its own, for kernels that other tests run do not count, and processes share pytest's cases."""
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "tests.support.vocab.triton_run", "--report", str(report)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(report.read_text().splitlines()[-1])
    source = "".join(path.read_text() for path in [*BACKENDS.glob("*.py"), SAMPLE])
    launched = set(re.findall(r"(?:kernels|accumulating|differentiating|plainly|weighing)\.(\w+)\[\(", source)) | {
        "finish",
        "label_coefficient",
    }
    assert set(found["kernels"]) == launched
    assert len(launched) > 15
    assert found["one_sided"] == []
