"""Every storage that torch code makes, from the operator that makes it to its last reference: O(1) per operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

BLOCK = 512  # what CUDA's allocator rounds a request up to
FOREVER = 1 << 62
LOGITS = ("activations", "activation gradients", "loss workspace")  # what tensors of the vocabulary's width are of
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def rounded(nbytes: int) -> int:
    """Bytes as a GPU's allocator hands them out."""
    return -(-nbytes // BLOCK) * BLOCK


@dataclass(slots=True, eq=False)
class Allocation:
    """One storage: how large, what made it, and between which events it was alive."""

    nbytes: int
    shape: tuple[int, ...]  # of the first tensor on it
    dtype: str
    op: str
    module: str
    category: str
    born: int
    died: int = FOREVER

    def alive(self, event: int) -> bool:
        return self.born <= event < self.died


class Tracker(TorchDispatchMode):
    """Counts each new storage once, and takes it off again when it is freed.

    `here` says (module, category) of what runs now; `run` runs an operator, `func(*args, **kwargs)` unless given;
    `head` is the shape of the output head's weight, (vocabulary, hidden). With a `device` what lies on another one is
    counted apart, in `elsewhere` and `most_elsewhere`.
    Events are allocations and frees; `curve[i]` is what was alive after event i. Scratch memory inside one operator
    is not seen.
    """

    def __init__(
        self,
        here: Callable[[], tuple[str, str]],
        run: Run | None = None,
        head: tuple[int, ...] = (),
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.here, self.run, self.head, self.device = here, run, head, device
        self.elsewhere = self.most_elsewhere = 0
        self._away: dict[int, int] = {}
        self.vocab = head[0] if head else 0
        self.allocations: list[Allocation] = []
        self.curve: list[int] = [0]
        self._alive: dict[int, Allocation] = {}

    @property
    def live(self) -> int:
        return self.curve[-1]

    @property
    def now(self) -> int:
        """The last event."""
        return len(self.curve) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor: what it does to its local tensors comes here again
        kwargs = kwargs or {}
        place = self.here()
        for x in tensors_of((args, kwargs)):
            self._given(x, "inputs", "")
        out = func(*args, **kwargs) if self.run is None else self.run(func, args, kwargs)
        for x in tensors_of(out):
            storage = x.untyped_storage()
            if self._is_new(storage):
                self._add(x, storage, func.overloadpacket.__name__, *place)
        return out

    def know(self, x: Tensor, category: str, module: str = "") -> None:
        """Count a tensor that existed before."""
        for part in tensors_of(x):
            self._given(part, category, module)

    def name(self, x: Tensor | None, category: str, module: str | None = None) -> None:
        """Give a tensor's storage its category, for all of its life."""
        for found in self._known(x):
            found.category = category
            found.module = found.module if module is None else module

    def category(self, x: Tensor) -> str:
        """The category of a tensor's storage, "" where it is not known."""
        return next((found.category for found in self._known(x)), "")

    def resized(self, storage: Any) -> None:
        """Take note of a storage's new size."""
        found, size = self._alive.get(storage._cdata), rounded(storage.nbytes())
        if found is not None and size != found.nbytes:
            self._end(found)
            self._begin(storage._cdata, replace(found, nbytes=size, died=FOREVER))

    def _known(self, x: Tensor | None) -> list[Allocation]:
        keys = [part.untyped_storage()._cdata for part in tensors_of(x)]
        return [self._alive[key] for key in keys if key in self._alive]

    def _given(self, x: Tensor, category: str, module: str) -> None:
        storage = x.untyped_storage()
        if self._is_new(storage):
            self._add(x, storage, "given", module, category)

    def _is_new(self, storage: Any) -> bool:
        return storage._cdata not in self._alive and storage._cdata not in self._away

    def _add(self, x: Tensor, storage: Any, op: str, module: str, category: str) -> None:
        if self.run is None and isinstance(x, FakeTensor):
            return  # of a real step: DTensors try out how an operator's result is divided
        shape = tuple(x.shape)
        if op != "given" and category in LOGITS and len(shape) > 1 and self.vocab in shape:
            category = self._of_head(shape, category)
        size = rounded(storage.nbytes())
        if self.device is not None and x.device.type != self.device:
            self._away[storage._cdata] = size
            self.elsewhere += size
            self.most_elsewhere = max(self.most_elsewhere, self.elsewhere)
            weakref.finalize(storage, self._left, storage._cdata).atexit = False
            return
        dtype = str(x.dtype).removeprefix("torch.")
        self._begin(storage._cdata, Allocation(size, shape, dtype, op, module, category, self.now))
        weakref.finalize(storage, self._free, storage._cdata).atexit = False

    def _begin(self, key: int, made: Allocation) -> None:
        self.curve.append(self.curve[-1] + made.nbytes)
        made.born = self.now
        self.allocations.append(made)
        self._alive[key] = made

    def _end(self, found: Allocation) -> None:
        self.curve.append(self.curve[-1] - found.nbytes)
        found.died = self.now

    def _of_head(self, shape: tuple[int, ...], category: str) -> str:
        """The category of what has the vocabulary's width, or of the head's gradient."""
        if shape in (self.head, self.head[::-1]):
            return "gradients" if category == "activation gradients" else category
        return "logits" if shape[-1] == self.vocab else category

    def _left(self, key: int) -> None:
        self.elsewhere -= self._away.pop(key)

    def _free(self, key: int) -> None:
        self._end(self._alive.pop(key))


@contextmanager
def resizes_told(tracker: Tracker) -> Iterator[None]:
    """While it lasts, the tracker hears of storages that change their size, which no operator does.

    FSDP2 frees gathered weights so, and fills them again.
    """
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        done = resize(storage, size)
        tracker.resized(storage)
        return done

    with patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


def tensors_of(value: Any) -> Iterable[Tensor]:
    """The strided tensors in nested lists, tuples and dictionaries, of a DTensor those that it is made of.

    A pytree would cost more than the operator.
    """
    found: list[Tensor] = []
    waiting = [value]
    while waiting:
        x = waiting.pop()
        if isinstance(x, Tensor):
            if is_traceable_wrapper_subclass(x):
                waiting.extend(getattr(x, name) for name in x.__tensor_flatten__()[0])
            elif x.layout is torch.strided:
                found.append(x)
        elif isinstance(x, list | tuple):
            waiting.extend(x)
        elif isinstance(x, dict):
            waiting.extend(x.values())
    return found
