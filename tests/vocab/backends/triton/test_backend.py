"""The Triton backend, every kernel and option, under Triton's interpreter or on a GPU.

The interpreter has to be asked for before triton is first imported, which torch itself does early: so the cases run in
a process of their own, which answers one by one.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from logitless.sample import sample_tokens
from logitless.vocab.backends.triton import tuned
from tests.support.vocab.triton_cases import CASES, SLOW

BACKENDS = Path(tuned.__file__).parent
SAMPLE = Path(sys.modules[sample_tokens.__module__].__file__).with_name("triton_draw.py")

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def run_case() -> Iterator[Callable[[str], str]]:
    """Runs a case in the other process: '' or what went wrong."""
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.support.vocab.triton_cases", "--serve"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:

        def ask(name: str) -> str:
            print(name, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())["error"]

        yield ask
        process.stdin.close()


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES])
def test_case(name, run_case):
    assert run_case(name) == ""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter tells which options a kernel had")
def test_every_kernel_and_option_is_run(tmp_path):
    report = tmp_path / "report.jsonl"
    arguments = "-W ignore::RuntimeWarning -m tests.support.vocab.triton_cases --report"
    command = [sys.executable, *arguments.split(), str(report)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(report.read_text().splitlines()[-1])
    source = "".join(path.read_text() for path in [*BACKENDS.glob("*.py"), SAMPLE])
    launched = set(re.findall(r"(?:kernels|folding|unfolding)\.(\w+)\[\(", source)) | {"finish", "label_slope"}
    assert set(found["kernels"]) == launched
    assert len(launched) > 15
    assert found["one_sided"] == []
