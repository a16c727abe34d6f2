"""Runs of the command line in processes of their own: by a launcher, or killed in the middle."""

import os
import signal
import subprocess
import sys
from typing import Any

from logitless.workbench.runs.options import RunOptions

KILLED = """
import os, signal, sys
from logitless.cli.main import main
from logitless.workbench.runs import callbacks
from logitless.workbench.sft import run as sft

log = callbacks.Records.on_log
def on_log(self, args, state, control, **kw):
    log(self, args, state, control, **kw)
    if state.global_step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
callbacks.Records.on_log = on_log
sft.measure = lambda config, tokens: {m: {"not_measured": "test"} for m in ("logitless", "dense")}
raise SystemExit(main(sys.argv[2:]))
"""


def flags(config: RunOptions) -> list[str]:
    """The command line that says what `config` says."""
    usual = type(config)().to_dict()
    return [x for name, value in config.to_dict().items() if value != usual[name] for x in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    return [option] if value is True else [option, str(value)]


def killed_at(step: int, *arguments: Any) -> None:
    """`logitless ARGUMENTS`, killed when this step has been recorded."""
    done = _ended([sys.executable, "-c", KILLED, step, *arguments])
    assert done.returncode == -signal.SIGKILL, done.stderr


def finished(*command: Any, **environment: str) -> str:
    """What a command that ends well writes to its standard output."""
    done = _ended([sys.executable, "-m", *command], **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _ended(command: list[Any], **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False, env=environment)
