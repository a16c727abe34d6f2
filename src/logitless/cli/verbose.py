"""`--verbose`, which every command takes: what the library tells of its calls, on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

OPTION = "--verbose"
HELP = f"{OPTION} says on stderr, once for each kind of call, its price, which backend serves it, and why not another."


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"logitless: {record.getMessage()}", file=sys.stderr)  # as it is now: a progress bar puts lines above it


@contextmanager
def listening(arguments: Sequence[str]) -> Iterator[list[str]]:
    """The arguments without the option; with it, and but for other ranks, the library is listened to meanwhile."""
    left = [argument for argument in arguments if argument != OPTION]
    if len(left) == len(arguments) or os.environ.get("RANK", "0") != "0":
        yield left
        return
    logger, handler = logging.getLogger("logitless"), _Lines()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield left
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
