r"""`logitless train` as a rank of a torchrun launch, its memory unmeasured; a rank may die, or the launch be stopped.

torchrun --nproc-per-node 2 -m tests.support.workbench.launched [KILL|STOP|TERM|INT STEP] \
    [DIFFER OPTION=VALUE|LIBRARY=VERSION] train ...
"""

import os
import signal
import sys

from logitless.cli.main import main
from logitless.workbench.runs import ranks
from logitless.workbench.runs.callbacks import Records
from logitless.workbench.sft import run as sft

sft.measure = lambda config, tokens: {method: {"not_measured": "test"} for method in ("logitless", "dense")}


def end_at(name: str, step: int) -> None:
    """The last rank kills itself when this step begins, as a machine that fails does; STOP: it only falls silent.

    TERM and INT: it ends its launcher, as a scheduler or a terminal does.
    """
    begin = Records.on_step_begin

    def on_step_begin(self, args, state, control, **rest):
        begin(self, args, state, control, **rest)
        if state.global_step == step and args.process_index == args.world_size - 1:
            whom = os.getppid() if name in ("TERM", "INT") else os.getpid()
            os.kill(whom, signal.Signals[f"SIG{name}"])

    Records.on_step_begin = on_step_begin


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] in ("KILL", "STOP", "TERM", "INT"):
        end_at(arguments[0], int(arguments[1]))
        arguments = arguments[2:]
    if arguments[0] == "DIFFER":  # ranks after the first are told something else, or have another version of a library
        other, arguments = arguments[1].split("="), arguments[2:]
        if os.environ["RANK"] == "0":
            other = []
        elif not other[0].startswith("--"):
            (name, version), other = other, []
            installed = ranks.version_of
            ranks.version_of = lambda library: version if library == name else installed(library)
        arguments += other
    raise SystemExit(main(arguments))
