"""The Triton backend, every kernel and option, under Triton's interpreter or on a GPU.

The interpreter has to be asked for before triton is first imported, which torch itself does early: so the cases run in
a process of their own, which answers one by one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.vocab.triton_cases import CASES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def run_case() -> Iterator[Callable[[str], str]]:
    """Runs a case in the other process: '' or what went wrong."""
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.vocab.triton_cases", "--serve"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:

        def ask(name: str) -> str:
            print(name, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())["error"]

        yield ask
        process.stdin.close()


@pytest.mark.parametrize("name", CASES)
def test_case(name, run_case):
    assert run_case(name) == ""
