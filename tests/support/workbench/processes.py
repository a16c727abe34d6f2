"""Runs of the command line in processes of their own: by a launcher, or killed in the middle."""

import os
import signal
import subprocess
import sys
from typing import Any

from logitless.cli.main import main
from logitless.workbench.common.options import RunOptions
from logitless.workbench.runs import callbacks
from logitless.workbench.sft import run as sft
from tests.support import forked


def flags(config: RunOptions) -> list[str]:
    """The command line that says what `config` says."""
    usual = type(config)().to_dict()
    return [x for name, value in config.to_dict().items() if value != usual[name] for x in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    return [option] if value is True else [option, str(value)]


def killed_at(step: int, *arguments: Any) -> None:
    """`logitless ARGUMENTS`, killed when this step has been recorded."""
    status, written = forked.module(__name__, step, *arguments)
    assert status == -signal.SIGKILL, written


def finished(*command: Any, **environment: str) -> str:
    """What a command that ends well writes to its standard output."""
    done = _ended([sys.executable, "-m", *command], **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _ended(command: list[Any], **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False, env=environment)


def _kill_at(step: int) -> None:
    """Ends this process when it has recorded a training step, whose memory it does not measure."""
    log = callbacks.Records.on_log

    def on_log(self, args, state, control, **rest):
        log(self, args, state, control, **rest)
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks.Records.on_log = on_log
    sft.measure = lambda config, tokens: {method: {"not_measured": "test"} for method in ("logitless", "dense")}


if __name__ == "__main__":
    _kill_at(int(sys.argv[1]))
    raise SystemExit(main(sys.argv[2:]))
