"""The search for noise that can still win, by the library in C++ where that lies on the disk or pays for itself.

Its integers are the same either way, so that what was drawn never depends on when that was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.compiled_support import why_not
from ...noise import PLAIN, Search, blocks_reaching
from . import library
from .library import is_plain

PAID = 1 << 26  # ids that plain operations look through in the time that compiling the library takes
AT_A_TIME = 1 << 22  # ids of a call of the library

_looked_through = 0  # ids, by plain operations in this process
_at_hand = False  # whether there was a library, or one to make, so that no draw looks at the disk again


def search_of(seeds: Tensor) -> Search:
    """How to search the noise of these seeds."""
    if seeds.device.type != "cpu":
        return PLAIN
    plain = is_plain(seeds) and not torch.compiler.is_compiling()
    return Search(_by_library, AT_A_TIME) if plain and _pays(seeds.device) else Search(_counted)


def _pays(device: torch.device) -> bool:
    """Whether there is a library, and nothing to compile or enough to look through."""
    global _at_hand
    _at_hand = _at_hand or library.is_made() or (_looked_through >= PAID and why_not(device) is None)
    return _at_hand and library.library() is not None


def _counted(seeds: Tensor, positions: Tensor, blocks: Tensor, words: Tensor) -> Tensor:
    global _looked_through
    _looked_through += 4 * len(seeds) * len(blocks)
    return blocks_reaching(seeds, positions, blocks, words)


def _by_library(seeds: Tensor, positions: Tensor, blocks: Tensor, words: Tensor) -> Tensor:
    reached = torch.empty(len(seeds), len(blocks), dtype=torch.bool, device=seeds.device)
    given = [x.contiguous() for x in (seeds, positions, words, blocks)]
    addresses = (x.data_ptr() for x in given)
    call = library.Search(*addresses, len(seeds), len(blocks), reached.data_ptr())
    library.run(library.library().search, call)
    return reached
