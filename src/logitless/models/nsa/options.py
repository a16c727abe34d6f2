"""Sizes of Native Sparse Attention (Yuan et al., arXiv 2502.11089), no torch import."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ...errors import ConfigError, OptionError

FIRST_AND_NEAREST = 3  # blocks that every query selects


@dataclass(frozen=True)
class NSAOptions:
    """What a query sees, in tokens and blocks. Raises OptionError from `check`.

    Compressed: blocks of `block` keys, one every `stride`. Selected: `selected` blocks of `selected_block` keys, the
    first one and the two nearest always among them. Sliding: the last `window` keys.
    """

    block: int = 32
    stride: int = 16
    selected_block: int = 64
    selected: int = 16
    window: int = 512

    def check(self) -> NSAOptions:
        for name, value in asdict(self).items():
            if value < 1:
                raise OptionError(f"nsa {name} must be at least 1, got {value}")
        for name in ("block", "selected_block"):
            if getattr(self, name) % self.stride:
                raise OptionError(f"nsa {name} must be a multiple of stride {self.stride}, got {getattr(self, name)}")
        return self

    def compressed(self, keys: int) -> int:
        """Whole compressed blocks among so many keys."""
        return max(0, (keys - self.block) // self.stride + 1)

    def blocks_of_a_query(self, keys: int) -> int:
        """How many blocks a query selects where it sees so many keys."""
        return min(max(self.selected, FIRST_AND_NEAREST), -(-keys // self.selected_block))

    def chunk(self, heads: int, keys: int, budget: int) -> int:
        """Queries whose scores and weights, in fp32, fit `budget` bytes; at least one."""
        per_query = 4 * 3 * heads * (self.compressed(keys) + self.window)
        return max(1, min(keys, self.window, budget // per_query))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def saved_with_nsa(config: Any) -> bool:
    """Whether a transformers configuration names native sparse attention."""
    return bool(getattr(config.get_text_config(), "nsa", None))


def options_of(config: Any) -> NSAOptions:
    """The sizes that a transformers configuration names, the defaults where it names none. Raises ConfigError."""
    given, names = getattr(config.get_text_config(), "nsa", None) or {}, [field.name for field in fields(NSAOptions)]
    if not isinstance(given, dict) or not given.keys() <= set(names) or any(type(x) is not int for x in given.values()):
        raise ConfigError(f"config.json: nsa: expected whole numbers for some of {', '.join(names)}, got {given!r}")
    return NSAOptions(**given).check()
