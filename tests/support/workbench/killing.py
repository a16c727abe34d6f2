"""A run in a process of its own that is killed in the middle of writing a file."""

import multiprocessing
import os
import signal

import torch

from logitless.workbench.scoring import block, documents, parts
from logitless.workbench.scoring.config import ScoreConfig
from logitless.workbench.scoring.run import run


def killed(after: int | str, config: ScoreConfig) -> int:
    """The exit status of a run that ends after so many parts, or in the "merge"; "never": at its end.

    Forked from a server that has imported everything: that takes longer than the run, and this process has threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_run, args=(after, config))
    process.start()
    process.join(120)
    process.kill()
    return process.exitcode


def _run(after: int | str, config: ScoreConfig) -> None:
    torch.set_num_threads(1)
    documents.PIECE = block.PIECE = 400
    write_whole, written = parts.write_whole, 0

    def write_then_die(path, write):
        nonlocal written
        merging = path == config.place

        def half(temporary):
            write(temporary)
            if after == ("merge" if merging else written):
                temporary.write_bytes(temporary.read_bytes()[:-100])
                os.kill(os.getpid(), signal.SIGKILL)

        write_whole(path, half)
        written += not merging

    parts.write_whole = write_then_die
    run(config)
