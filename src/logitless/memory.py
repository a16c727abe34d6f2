"""Where memory goes: arithmetic for a run that has not started, and traces of one that has."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .workbench.profile.trace import trace as trace

__all__ = ["trace"]


def __getattr__(name: str) -> Any:
    if name != "trace":
        raise AttributeError(f"module 'logitless.memory' has no attribute {name!r}; it has trace")
    from .workbench.profile.trace import trace

    return trace
