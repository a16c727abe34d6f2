"""Whether this machine multiplies in registers faster than by torch: measured once, and kept beside the library."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from .library import Factor, Head, Streamed, Sums, library, run
from .panels import rounded

TOKENS, SIZE, ENTRIES, WIDTH = 256, 512, 8192, 2048  # of the products that are compared, and of torch's slices
ROUNDS = 6


MOST = {False: 1.05, True: 0.85}  # times torch's bare product, which values are more than, by whether logits stay


def is_faster(kept: bool) -> bool:
    """Whether fp32 products in registers are worth it, by log-prob and entropy in the time of torch's bare product.

    kept: for logits that stay, whose other products are bare. There has to be a library.
    """
    return _ratio(library().place) <= MOST[kept]


@cache
def _ratio(place: Path) -> float:
    """Time in registers over that of torch's product: from the disk where it was measured before."""
    kept = place.with_suffix(".ratio")
    try:
        return float(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ratio = _measure()
    try:
        with tempfile.TemporaryDirectory(dir=place.parent) as own:
            made = Path(own, kept.name)
            made.write_text(f"{ratio:.3f}", encoding="utf-8")
            os.replace(made, kept)
    except OSError:  # measured again by the next process
        pass
    return ratio


@torch.no_grad()
def _measure() -> float:
    found, names = library(), ("m", "rest", "peaks", "t")
    tokens = rounded(TOKENS, found.lanes())
    with torch.inference_mode(False), torch.device("cpu"):  # whatever the caller's
        room = partial(torch.zeros, dtype=torch.float32)
        hidden, weight, slices = room(TOKENS, SIZE), room(ENTRIES, SIZE), room(TOKENS, WIDTH)
        packed, sums = room(SIZE, tokens), room(len(names), found.parts(), tokens)
    factor = Factor(hidden.data_ptr(), SIZE, weight.data_ptr(), SIZE, SIZE, 0)
    head = Head(ctypes.pointer(factor), 1, packed=packed.data_ptr())
    streamed = Streamed(head=head, n_tokens=TOKENS, vocab=ENTRIES, parts=found.parts())
    streamed.sums = Sums(**{name: x.data_ptr() for name, x in zip(names, sums, strict=True)})

    def by_torch() -> None:
        for part in weight.split(WIDTH):
            torch.mm(hidden, part.t(), out=slices)

    def in_registers() -> None:
        run(found.accumulate, streamed)

    turns = [(_seconds(in_registers), _seconds(by_torch)) for _ in range(ROUNDS)]
    ours, theirs = map(min, zip(*turns[1:], strict=True))  # the first ones make their pages
    return ours / theirs


def _seconds(way: Callable[[], None]) -> float:
    begun = time.perf_counter()
    way()
    return time.perf_counter() - begun
