"""What a step does on the device, operator by operator: waits, launches, and the options that its kernels had."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a number from the device, or makes a result whose size depends on its numbers."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.REFUSED or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Counts the operators that need a number of the device's, but for the lists that are asked for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Counts the operators that compute something, and this backend's kernels under the interpreter."""

    FREE = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        nothing = isinstance(out, torch.Tensor) and out.numel() == 0
        poison = name == "fill_" and (args[1] != args[1] or args[1] >= 1 << 29)  # what tests put into empty memory
        self.count += not (func.is_view or name in self.FREE or nothing or poison)
        return out

    def of(self, step: Callable[[], object]) -> int:
        """How many a step takes, once everything is compiled."""

        def counted(launch: Callable[..., None], kernel: object, *args: object, **kwargs: object) -> None:
            self.count += 1
            with _disable_current_modes():
                launch(kernel, *args, **kwargs)

        step()
        with _every_launch(counted), self:
            step()
        return self.count


class Options:
    """Which values each kernel's options had, of all kernels that the interpreter ran."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, set[object]]] = {}

    def watch(self) -> AbstractContextManager[object]:
        def see(launch: Callable[..., None], kernel: Any, *args: Any, **kwargs: Any) -> None:
            there = {name: x for name, x in kwargs.items() if name in inspect.getfullargspec(kernel.fn).args}
            given = inspect.getcallargs(kernel.fn, *args, **there)
            options = self.seen.setdefault(kernel.fn.__name__, {})
            for name, x in given.items():
                if name.isupper():
                    options.setdefault(name, set()).add(x)
            launch(kernel, *args, **kwargs)

        return _every_launch(see)

    def one_sided(self) -> list[str]:
        """Switches that were never on, or never off."""
        pairs = [(kernel, name, x) for kernel, options in self.seen.items() for name, x in options.items()]
        return [f"{kernel} {name}" for kernel, name, x in pairs if len(x) == 1 and isinstance(*x, bool)]


def _every_launch(instead: Callable[..., None]) -> AbstractContextManager[object]:
    """Each kernel that the interpreter would run goes to `instead`, after the function that runs it."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__
    return patch.object(GridExecutor, "__call__", lambda *args, **kwargs: instead(launch, *args, **kwargs))
