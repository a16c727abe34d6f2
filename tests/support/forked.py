"""Processes of their own that have imported everything: forked from a server, in a tenth of the time of a new Python.

Each process of pytest has one such server, of `multiprocessing`, which imports torch and the runs of all commands, runs
nothing, and so has no threads when it forks. What it forks has its own memory, signals, exit status, environment,
directory and output. A new interpreter is for what reads the environment while it is imported, for launchers, and for
tests of how Python starts or ends.
"""

import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

FORKED = get_context("forkserver")
FORKED.set_forkserver_preload([f"logitless.workbench.{name}.run" for name in ("sft", "align", "scoring")])


def module(name: str, *arguments: Any, timeout: float = 300, **environment: str) -> tuple[int, str]:
    """Exit status and output of `python -m NAME ARGUMENTS` with one thread."""
    return modules(name, *arguments, timeout=timeout, environments=[environment])


def ranks(name: str, *arguments: Any, size: int = 2, timeout: float = 150) -> None:
    """`python -m NAME ARGUMENTS` on some ranks as a launcher starts them; fails with what they wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    meeting |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    each = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    status, written = modules(name, *arguments, timeout=timeout, environments=each)
    assert status == 0, written[-4000:]


def modules(name: str, *arguments: Any, timeout: float, environments: Sequence[dict[str, str]]) -> tuple[int, str]:
    """The first status other than 0 of a module in some processes, which ends them all, and what they wrote."""
    with tempfile.NamedTemporaryFile() as output:
        given = (output.name, name, [str(x) for x in arguments])
        started = [begin(_module, {**os.environ, "OMP_NUM_THREADS": "1", **more}, *given) for more in environments]
        try:
            status = _first_failure(started, time.monotonic() + timeout)
        finally:
            for process in started:
                process.kill()
                process.join()
        return status, Path(output.name).read_text(errors="replace")


def begin(work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A function in a forked process."""
    process = FORKED.Process(target=work, args=arguments)
    process.start()
    return process


def _first_failure(started: list[ForkServerProcess], deadline: float) -> int:
    while running := [process for process in started if process.exitcode is None]:
        if not wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
            raise AssertionError(f"{len(running)} of {len(started)} processes did not end in time")
        if failed := [process.exitcode for process in started if process.exitcode]:
            return failed[0]
    return max((process.exitcode or 0 for process in started), key=abs)


def _module(environment: dict[str, str], output: str, name: str, arguments: list[str]) -> None:
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
