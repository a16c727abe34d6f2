"""How this process was launched: alone, or as one of several ranks (no torch import)."""

from __future__ import annotations

import os

from ...errors import OptionError


def launched_ranks(which: str = "WORLD_SIZE") -> int:
    """How many processes this one was launched as one of. OptionError where the environment says no number."""
    told = os.environ.get(which, "1")
    if not told.isdecimal():
        raise OptionError(f"{which}={told!r} in the environment: expected a number of ranks; unset it, or use torchrun")
    return int(told)


def launched(command: str) -> str:
    """The start of a command line that launches a command as this process was launched."""
    ranks, here = launched_ranks(), launched_ranks("LOCAL_WORLD_SIZE")
    if ranks == 1:
        return f"logitless {command}"
    launcher = f"torchrun --nproc-per-node {ranks}" if here == ranks else "on every machine the same launch of"
    return f"{launcher} -m logitless.cli {command}"
