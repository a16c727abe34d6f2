"""The search for noise that can still win: compiled once a process has spent on it what loading a function takes.

Its integers are the same either way, so that what was drawn never depends on when that was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.compiled_support import why_not
from ...noise import PLAIN, Search, blocks_reaching
from . import kernels
from .kernels import Tensors

PAID = 1 << 28  # ids that plain operations look through in the time that loading a compiled function takes
AT_A_TIME = 1 << 21  # ids of a compiled call

_looked_through = 0  # ids, by plain operations in this process


def search_of(seeds: Tensor) -> Search:
    """How to search the noise of these seeds."""
    if seeds.device.type != "cpu":
        return PLAIN
    plain = kernels.is_plain(seeds) and not torch.compiler.is_compiling()
    pays = plain and _looked_through >= PAID and why_not(seeds.device) is None
    return Search(_compiled, AT_A_TIME) if pays else Search(_counted)


def _counted(seeds: Tensor, positions: Tensor, blocks: Tensor, words: Tensor) -> Tensor:
    global _looked_through
    _looked_through += 4 * len(seeds) * len(blocks)
    return blocks_reaching(seeds, positions, blocks, words)


def _compiled(seeds: Tensor, positions: Tensor, blocks: Tensor, words: Tensor) -> Tensor:
    tensors = {"seeds": seeds, "positions": positions, "blocks": blocks, "words": words}
    return kernels.run("search", _reached, tensors, ("blocks",))["reached"]


def _reached(tensors: Tensors) -> Tensors:
    return {"reached": blocks_reaching(**tensors)}
