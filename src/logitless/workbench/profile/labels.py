"""Which module an operator belongs to, forward and backward, and what kind of memory it makes.

In backward the module is that of the forward operator whose gradient it is: autograd numbers its nodes in the order
of the forward operators, so the numbers at which modules were entered and left tell nodes apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr as sequence_number
from torch.utils.hooks import RemovableHandle

OUTSIDE = {"loss": "loss workspace", "optimizer": "optimizer workspace"}  # categories by root
WRAPPERS = ("base_model.model.", "module.", "_orig_mod.")
Listener = Callable[[str, bool], None]  # a module's name and whether it was entered (True) or left


class Labels:
    """Names what runs now; `root` is the name of what runs outside of every module."""

    def __init__(self, model: nn.Module, listener: Listener) -> None:
        self.root = "model"
        self.listener = listener
        self.backward = False  # whether what runs now is a backward pass
        self.accumulated = False  # whether a parameter's gradient has arrived
        self._stack: list[str] = []
        self._numbers: list[int] = [0]
        self._names: list[str] = [""]
        self._params = {id(p): short(name) for name, p in model.named_parameters()}
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._watch(module, short(name))

    def _watch(self, module: nn.Module, name: str) -> None:
        def enter(*_: Any) -> None:
            if name:
                self._stack.append(name)
                self._turn()
            if not in_backward():
                self.listener(name, True)

        def leave(*_: Any) -> None:
            if name:
                self._stack.pop()
                self._turn()
            if not in_backward():
                self.listener(name, False)

        self._handles.append(module.register_forward_pre_hook(enter))
        # always: a checkpoint stops its second forward pass early, by an exception
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _turn(self) -> None:
        self._numbers.append(sequence_number())
        self._names.append(self._stack[-1] if self._stack else self.root)

    def run_in(self, root: str) -> None:
        """Name what runs outside of every module from now on."""
        self.root = root
        self._turn()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def here(self) -> tuple[str, str]:
        """(module, category) of the operator that runs now."""
        node = torch._C._current_autograd_node()
        self.backward = node is not None
        if node is None:
            return self._stack[-1] if self._stack else self.root, OUTSIDE.get(self.root, "activations")
        if torch.is_grad_enabled():  # a checkpointed layer is computed again
            return self._stack[-1] if self._stack else self._of(node), "activations"
        return self._of(node), "activation gradients"

    def _of(self, node: Any) -> str:
        variable = getattr(node, "variable", None)
        if variable is not None:
            self.accumulated |= id(variable) in self._params
            return self._params.get(id(variable), "")
        found = self._names[bisect_right(self._numbers, node._sequence_nr()) - 1]
        return found or self.root


def in_backward() -> bool:
    return torch._C._current_autograd_node() is not None


def short(name: str) -> str:
    """A module's name without the wrappers around the model."""
    while wrapper := next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), ""):
        name = name.removeprefix(wrapper)
    return "" if f"{name}." in WRAPPERS or name == "base_model" else name
