"""A model on the meta device traced as a GPU or a CPU would run it: fake tensors, and what they cannot know."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from ...errors import ConfigError
from ...vocab.face import Sizing, sizing
from .labels import Labels
from .lint import Lint
from .storages import tensors_of

aten = torch.ops.aten
GPU = "meta"  # the device type that stands for a GPU: fake `cuda` tensors need a build with CUDA
CHUNKS = 2  # of the logitless loss: a later chunk allocates what the second did
FALSE = {aten.isnan, aten.isinf, aten.isposinf, aten.isneginf}
FALSE_OF_FALSE = {
    *(aten.any, aten.all, aten.amax, aten.max, aten.sum, aten.mean, aten.count_nonzero, aten.clone, aten._to_copy),
    *(aten.logical_or, aten.bitwise_or, aten.add, aten.logical_or_, aten.bitwise_or_, aten.add_, aten.copy_),
}
OPERANDS = ("Tensor", "number")  # the types of arguments with which an operator calculates


class Fakes:
    """Runs operators on fake tensors, answers questions about data that does not exist, and lints devices.

    Numbers are 1, conditions hold, nothing is found and nothing is NaN or infinite, by `isnan`, `isinf` and what
    FALSE_OF_FALSE makes of them. What a pass over the vocabulary needs to know of its data `vocab.sizing` tells it.
    """

    def __init__(self, device: str, labels: Labels) -> None:
        self.device, self.labels = device, labels
        self.lint = Lint(device)
        self._false: set[int] = set()  # storages of what is false
        self._special = {
            aten._local_scalar_dense.default: self._number,
            aten.nonzero.default: self._nonzero,
            aten.mm.dtype_out: lambda func, args, kwargs: kwargs["out"],
            aten.addmm.dtype_out: lambda func, args, kwargs: kwargs["out"],
        }

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`."""
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if self.device != "cpu":
            args, kwargs = self.lint.checked(func, args, kwargs)
        out = func(*args, **kwargs)
        if self.device != "cpu":
            self.lint.created(tensors_of(out), args)
        if self._gives_false(func, args):
            for x in tensors_of(out):
                self._set_false(x.untyped_storage())
        elif func._schema.is_mutable:  # written to
            self._false.difference_update(x.untyped_storage()._cdata for x in tensors_of(out))
        return out

    def _gives_false(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an operator's result is false: of what is false, beside which no number is an operand but 0."""
        if func.overloadpacket not in FALSE_OF_FALSE or not all(map(self._is_false, tensors_of(args))):
            return func.overloadpacket in FALSE
        operands = (x for x, place in zip(args, func._schema.arguments, strict=False) if str(place.type) in OPERANDS)
        return not any(x for x in operands if not isinstance(x, Tensor))

    def _is_false(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._false

    def _set_false(self, storage: Any) -> None:
        if storage._cdata not in self._false:
            self._false.add(storage._cdata)
            # another storage may come to lie there
            weakref.finalize(storage, self._false.discard, storage._cdata).atexit = False

    def _number(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if not isinstance(x, FakeTensor) or x.constant is not None:
            return func(*args, **kwargs)
        false = self._is_false(x)
        if x.dtype == torch.bool:
            return not false
        return float(not false) if x.is_floating_point() else int(not false)

    def _nonzero(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if self.labels.root != "loss":
            module = self.labels.here()[0]
            raise ConfigError(f"{module} chooses its work by its data, which a trace lacks: measure a real run")
        return x.new_empty((0, x.dim()), dtype=torch.int64)


def is_meta(model: nn.Module) -> bool:
    """Whether a model was built on the meta device: `with torch.device("meta")`."""
    return any(p.device.type == "meta" and not isinstance(p, FakeTensor) for p in model.parameters())


@contextmanager
def faked(model: nn.Module, device: str, ignored: int) -> Iterator[None]:
    """While it lasts, a meta model's parameters and buffers are fake tensors on `device`, "meta" or "cpu".

    ignored: how many labels of a step have no loss.
    """
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    own = [(table, name, x) for table in tables for name, x in table.items() if x is not None]
    made: dict[int, Tensor] = {}
    storages: dict[tuple[int, torch.dtype], Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(patch.object(fake_tensor.log, "disabled", True))  # errors arrive as exceptions
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for table, name, x in own:
            if id(x) not in made:
                made[id(x)] = _like(x, device, storages)
            table[name] = made[id(x)]  # pyright: ignore[reportArgumentType]
        stack.callback(_restore, own)
        stack.enter_context(_untraced_masks())
        stack.enter_context(sizing(Sizing(ignored, wide_products=device == GPU, most_chunks=CHUNKS)))
        if device == GPU:
            stack.enter_context(_gpu_kernels())
        yield


def _like(x: Tensor, device: str, storages: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    """A tensor of the same layout there, on the same one of `storages` as those that share x's."""
    there = x.untyped_storage()
    key = there._cdata, x.dtype
    if key not in storages:
        storages[key] = torch.empty(there.nbytes() // x.itemsize, dtype=x.dtype, device=device)
    y = storages[key].as_strided(x.shape, x.stride(), x.storage_offset())
    return nn.Parameter(y, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else y


def _restore(own: list[tuple[Any, str, Tensor]]) -> None:
    for table, name, x in own:
        table[name] = x


@contextmanager
def _untraced_masks() -> Iterator[None]:
    """transformers builds an S×S mask for what it takes to be traced; a real run builds none."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
    else:
        with patch.object(masks, "is_tracing", lambda tensor=None: False):
            yield


@contextmanager
def _gpu_kernels() -> Iterator[None]:
    """What GPUs have and the meta device has not: fused attention, fused AdamW, and autocast that is off."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", attention))
        stack.enter_context(patch.object(torch, "autocast", autocast))
        stack.enter_context(patch("torch.optim.adam._device_dtype_check_for_fused", lambda *_, **__: None))
        yield


on_host, cast_on_host = F.scaled_dot_product_attention, torch.autocast


def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    """torch's, which does not know the meta device; there nothing is cast, so that off is as it is anyway."""
    off = device_type == GPU and kwargs.get("enabled") is False
    return nullcontext() if off else cast_on_host(device_type, *args, **kwargs)


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What FlashAttention-2 (Dao, arXiv 2307.08691) allocates: no scores; a log-sum-exp per query and head.

    query: (B, heads, S, D); key, value: (B, heads or fewer, S', D). Returns (B, heads, S, D).
    """
    if any(x.device.type != GPU for x in (query, key, value)):
        return on_host(query, key, value, *args, **kwargs)
    return _Attention.apply(query, key, value)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, _, sums = ctx.saved_tensors
        groups = query.shape[1] // key.shape[1]
        summed = torch.empty_like(query, dtype=torch.float32)  # dq is summed over blocks of keys
        delta = torch.empty_like(sums)
        grads = [torch.empty_like(query)]
        for x in (key, value):
            each = x.new_empty(x.shape[0], x.shape[2], x.shape[1] * groups, x.shape[3]).transpose(1, 2)
            grads.append(each)
        del summed, delta
        if groups > 1:
            grads[1:] = [each.unflatten(1, (-1, groups)).sum(2) for each in grads[1:]]
        return tuple(grads)
