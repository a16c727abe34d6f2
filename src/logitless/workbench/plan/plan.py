"""The plan: what a run needs on each GPU, phase by phase, by arithmetic alone (no torch import)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...errors import OptionError
from .components import Component, components
from .setting import Setting


@dataclass(frozen=True)
class Plan:
    """The components of one way to compute the loss, and what follows from them."""

    setting: Setting
    way: str
    components: tuple[Component, ...]

    @cached_property
    def peaks(self) -> dict[str, int]:
        """Bytes alive in each phase."""
        phases = self.setting.kind.phases
        return {phase: sum(c.nbytes for c in self.components if phase in c.phases) for phase in phases}

    @property
    def peak_phase(self) -> str:
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def largest(self) -> Component:
        """The component with the largest single allocation."""
        return max(self.components, key=lambda c: c.largest)

    @property
    def margin(self) -> int:
        """Bytes left on each GPU after the reserve; negative: bytes missing."""
        return self.setting.gpu_bytes - self.setting.reserve - self.peak

    @property
    def fits(self) -> bool:
        return self.margin >= 0


def plan(setting: Setting, way: str = "logitless") -> Plan:
    """The plan of a setting, the loss computed the "logitless" or the "dense" way; OptionError for a bad setting."""
    if way not in ("dense", "logitless"):
        raise OptionError(f"way must be dense or logitless, got {way}")
    checked = setting.check()
    return Plan(checked, way, tuple(components(checked, way)))


def both(setting: Setting) -> tuple[Plan, Plan]:
    """(dense, logitless)."""
    return plan(setting, "dense"), plan(setting, "logitless")


def at_length(setting: Setting, length: int) -> Setting:
    """The setting with sequences of `length` tokens, split between prompt and response as before."""
    prompt = setting.prompt_length * length // setting.length
    if length - prompt < 1:
        raise OptionError(f"sequence lengths must be 1 or more, got {length}")
    return replace(setting, prompt_length=prompt, response_length=length - prompt)


def sweep(setting: Setting, lengths: Sequence[int], algorithms: Sequence[str] = ()) -> list[tuple[int, Plan, Plan]]:
    """(length, dense, logitless) for each sequence length and algorithm; those of the setting where none is given."""
    found = []
    for length in lengths or ((setting.length,) if algorithms else ()):
        for algorithm in algorithms or (setting.algorithm,):
            found.append((length, *both(at_length(replace(setting, algorithm=algorithm), length))))
    return found
