"""Processes of their own that have imported everything: forked from a server, in a tenth of the time of a new Python.

Each process of pytest has one such server, of `multiprocessing`, which imports torch and the runs of all commands, runs
nothing, and so has no threads when it forks. What it forks has its own memory, signals, exit status, environment,
directory and output. A new interpreter is for what reads the environment while it is imported, for launchers, and for
tests of how Python starts or ends.
"""

import os
import runpy
import socket
import subprocess
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
FORKED.set_forkserver_preload([f"logitless.workbench.{name}.run" for name in ("sft", "align", "grade", "scoring")])


def module(name: str, *arguments: Any, timeout: float = 300, **environment: str) -> tuple[int, str]:
    """Exit status and output of `python -m NAME ARGUMENTS`, one thread; in another environment a new interpreter."""
    if environment.items() <= os.environ.items():
        return modules(name, *arguments, timeout=timeout, environments=[{}])
    done = subprocess.run(
        [sys.executable, "-m", name, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout


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
        streams = (os.devnull, output.name, output.name)
        started = [_begin_module(streams, more, name, *map(str, arguments)) for more in environments]
        try:
            status = _first_failure(started, time.monotonic() + timeout)
        finally:
            for process in started:
                process.kill()
                process.join()
        return status, Path(output.name).read_text(errors="replace")


def run(
    command: Sequence[str], *, input: str = "", capture_output: bool = False, text: bool = False, check: bool = False
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a command `python -m NAME ARGUMENTS`; what is not captured goes nowhere."""
    python, option, *module = command
    assert (python, option) == (sys.executable, "-m")
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("in", "out", "err")]
        for stream in streams:
            stream.write_text(input if stream.name == "in" else "")
        process = _begin_module(streams, {}, *module)
        process.join()
        written = [stream.read_text() if text else stream.read_bytes() for stream in streams[1:]]
    done = subprocess.CompletedProcess(command, process.exitcode or 0, *(written if capture_output else ()))
    if check:
        done.check_returncode()
    return done


def begin(work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A function in a forked process."""
    process = FORKED.Process(target=work, args=arguments)
    process.start()
    return process


def _begin_module(streams: Sequence[str | Path], more: dict[str, str], name: str, *arguments: str) -> ForkServerProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return begin(_module, streams, environment, os.getcwd(), name, *arguments)


def _first_failure(started: list[ForkServerProcess], deadline: float) -> int:
    while running := [process for process in started if process.exitcode is None]:
        if not wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
            raise AssertionError(f"{len(running)} of {len(started)} processes did not end in time")
        if failed := [process.exitcode for process in started if process.exitcode]:
            return failed[0]
    return max((process.exitcode or 0 for process in started), key=abs)


def _module(
    streams: Sequence[str | Path], environment: dict[str, str], folder: str, name: str, *arguments: str
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(os.open(stream, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
