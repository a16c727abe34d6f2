"""The pass on tensors without numbers: what it allocates, for who plans memory, without what it would compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizing:
    """What fake or meta tensors cannot tell a pass that is to be sized.

    ignored: how many tokens have an ignored label; wide_products: whether the device that the tensors stand for
    multiplies bf16 operands into fp32; most_chunks: how many chunks of tokens
    run, since a later one allocates what the second did.
    """

    ignored: int = 0
    wide_products: bool = False
    most_chunks: int = 2


_CURRENT: ContextVar[Sizing | None] = ContextVar("sizing", default=None)


@contextmanager
def sizing(mode: Sizing) -> Iterator[None]:
    """While it lasts, passes take their answers about data from `mode` and ask the tensors nothing."""
    token = _CURRENT.set(mode)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_sizing() -> Sizing | None:
    """The mode that is in force here, None where passes compute."""
    return _CURRENT.get()
