"""TRL's trainers on the pass, without logits: names are imported on first use, so that rewards need no TRL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rewards import SelfCertaintyReward as SelfCertaintyReward
    from .trainers import STATISTICS as STATISTICS
    from .trainers import TokenOutput as TokenOutput
    from .trainers import adapted_head as adapted_head
    from .trainers import install as install
    from .trainers import uninstall as uninstall

__all__ = ["STATISTICS", "SelfCertaintyReward", "TokenOutput", "adapted_head", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{'rewards' if name == 'SelfCertaintyReward' else 'trainers'}"), name)
