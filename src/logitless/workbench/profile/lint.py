"""Device lint: tensors made on another device than the model's, with the file and line that made them."""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .storages import tensors_of

aten = torch.ops.aten
# Operators that take a host's tensor beside a GPU's.
MIXED = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten.set_.source_Tensor,
}
LIBRARY = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Site:
    """A line of code."""

    file: str
    line: int

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """A tensor on `device` met the model's tensors in `op`: an error on a GPU."""

    op: str
    device: str
    shape: tuple[int, ...]
    used: Site
    made: Site | None

    def __str__(self) -> str:
        where = f"made at {self.made}: {self.made.code}" if self.made else "made before the trace"
        return (
            f"{self.used}: {self.op} mixes a {self.device} tensor of shape {self.shape} with the model's device; "
            f"{where}; give device= there"
        )

    def as_json(self) -> dict[str, Any]:
        """The finding for machines."""
        return {
            "op": self.op,
            "device": self.device,
            "shape": list(self.shape),
            "file": self.used.file,
            "line": self.used.line,
            "code": self.used.code,
            "made_file": self.made.file if self.made else None,
            "made_line": self.made.line if self.made else None,
            "made_code": self.made.code if self.made else None,
        }


class Lint:
    """Watches operators for tensors that are not on `device`; what it finds is moved there, so the trace goes on."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.findings: dict[tuple[Site, Site | None], Finding] = {}
        self._made: dict[int, Site] = {}  # by storage

    def checked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments, with tensors of another device moved where the operator would fail on a GPU."""
        astray = home = False
        for x in tensors_of((args, kwargs)):
            if x.device.type == self.device:
                home = True
            elif x.dim():
                astray = True
        if not (astray and home) or func in MIXED:
            return args, kwargs
        used = user_site()
        for x in tensors_of((args, kwargs)):
            if x.device.type != self.device and x.dim():
                made = self._made.get(x.untyped_storage()._cdata)
                found = Finding(func.overloadpacket.__name__, x.device.type, tuple(x.shape), used, made)
                self.findings.setdefault((used, made), found)
        return self._moved(args), self._moved(kwargs)

    def created(self, tensors: Iterable[Tensor], args: Any) -> None:
        """Remember where tensors of another device come from: the line of the first of them in a chain."""
        for x in tensors:
            if x.dim() and x.device.type != self.device:
                storage = x.untyped_storage()
                if storage._cdata not in self._made:
                    before = (self._made.get(y.untyped_storage()._cdata) for y in tensors_of(args))
                    self._made[storage._cdata] = next((site for site in before if site), None) or user_site()
                    weakref.finalize(storage, self._made.pop, storage._cdata, None).atexit = False

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            stays = value.device.type == self.device or not value.dim()
            return value if stays else torch.empty_like(value, device=self.device)
        if isinstance(value, list | tuple):
            return type(value)(self._moved(x) for x in value)
        if isinstance(value, dict):
            return {name: self._moved(x) for name, x in value.items()}
        return value


def user_site() -> Site:
    """The innermost line outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARY):
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno)
