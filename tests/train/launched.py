"""`logitless train` as a rank of a torchrun launch, its memory unmeasured; a rank may die on the way.

torchrun --nproc-per-node 2 -m tests.train.launched [--die STEP] train ...
"""

import os
import signal
import sys

from logitless.cli.main import main
from logitless.train import sft
from logitless.train.callbacks import Records

sft.measure = lambda config, tokens: {method: {"not_measured": "test"} for method in ("chunked", "dense")}


def die_at(step: int) -> None:
    """The last rank kills itself, as a machine that fails does, when this step begins."""
    begin = Records.on_step_begin

    def on_step_begin(self, args, state, control, **rest):
        begin(self, args, state, control, **rest)
        if state.global_step == step and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    Records.on_step_begin = on_step_begin


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "--die":
        die_at(int(arguments[1]))
        arguments = arguments[2:]
    raise SystemExit(main(arguments))
