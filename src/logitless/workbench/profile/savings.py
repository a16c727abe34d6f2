"""What would make a step smaller: each change traced, none guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError, OptionError
from .recording import Recording
from .step import Step, traced

RANK, TILES = 16, 8
Change = Callable[[Step], Step | None]  # None: in use already


@dataclass(frozen=True)
class Saving:
    """A change of a step by its name, the step's recording with it, and the bytes that it saves."""

    name: str
    recording: Recording
    saved: int

    def as_json(self) -> dict[str, Any]:
        """The saving for machines."""
        return {"saving": self.name, "saved_bytes": self.saved, **self.recording.as_json()}


CHANGES: dict[str, Change] = {
    "logitless-loss": lambda s: replace(s, loss="logitless") if s.loss != "logitless" else None,
    "checkpointing": lambda s: replace(s, gradient_checkpointing=True) if not s.gradient_checkpointing else None,
    "offload": lambda s: (
        replace(s, gradient_checkpointing=True, offload_activations=True) if not s.offload_activations else None
    ),
    "tiled-mlp": lambda s: replace(s, mlp_tiles=TILES) if s.mlp_tiles == 1 else None,
    "lora": lambda s: replace(s, lora_rank=RANK) if not s.lora_rank else None,
    "half-context": lambda s: replace(s, context_length=s.context_length // 2) if s.context_length > 3 else None,
}


def chosen(names: Sequence[str]) -> list[str]:
    """The savings that were asked for; "all" is every one. Raises OptionError."""
    for name in names:
        if name != "all" and name not in CHANGES:
            raise OptionError(f"--savings must be all or some of {', '.join(CHANGES)}, got {name!r}")
    return [name for name in CHANGES if name in names or "all" in names]


def savings(
    step: Step,
    base: Recording,
    names: Sequence[str],
    known: dict[str, Recording],
    tell: Callable[[str], None] = lambda what: None,
) -> tuple[list[Saving], dict[str, str]]:
    """Each change that is not in use, traced, the largest saving first, and why the model takes others not.

    known: recordings by loss. tell: hears what is traced next.
    """
    found, refused = [], {}
    for name in chosen(names):
        changed = CHANGES[name](step)
        if changed is None:
            continue
        tell(f"tracing a step, {name}")
        try:
            recording = known[changed.loss] if name == "logitless-loss" else traced(changed)
        except ConfigError as error:  # as of tiles for layers that route
            refused[name] = str(error)
            continue
        found.append(Saving(name, recording, base.peak.nbytes - recording.peak.nbytes))
    return sorted(found, key=lambda saving: -saving.saved), refused
