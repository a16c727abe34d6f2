"""The pass as autograd nodes: `stats` for any upstream gradient, `attach` for a loss with its gradient formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...algebra.costs import Price
from ...algebra.stats import has_gradient
from ...errors import GradientError
from ...upstream import check_upstream
from ..call.call import DIFFERENTIATED, Call, Inputs, Needs, blank_ignored, computing_all, storable
from . import engine, kept
from .engine import LossPass, Saved, Together, loss_gradients
from .gradient import GradientBuffers
from .price import stats_price

NO_SECOND_DERIVATIVE = (
    "logitless: expected a first-order backward, got create_graph=True; second derivatives of the vocabulary pass "
    "are not defined: use the dense oracle (logitless.vocab.reference) for them"
)
NOT_DIFFERENTIATED = (None,) * (len(Inputs._fields) - DIFFERENTIATED)


def _drivers(call: Call) -> Any:
    """Where the call's `values` and `gradients` are: over whole rows, or over sampling masks."""
    return engine if call.sampling_mask is None else kept


class Held:
    """The tensors that a call holds itself: autograd looks after its inputs alone."""

    def __init__(self, call: Call) -> None:
        self.versions = [(name, x, x._version) for name, x in call.held() if not x.is_inference()]

    def check(self) -> None:
        """Raise GradientError where one has been written to since the forward pass."""
        for name, x, version in self.versions:
            if x._version != version:
                raise GradientError(
                    f"{name}: expected its tensor {tuple(x.shape)} as it was in the forward pass, got one that was "
                    "modified in place since; call backward first, or pass a clone"
                )


class _Stats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, price: Price, needs: Needs, names: list[str], *tensors: Any) -> Any:
        ctx.held, drivers = Held(call), _drivers(call)
        run = drivers.checked(call, price)
        call, (out, saved) = run.call, drivers.values(run, save=True)
        names.extend(out)
        ctx.call, ctx.price, ctx.needs, ctx.names = call.without_tensors(), price, needs, names
        ctx.saved_names, flat = saved.flat()
        ctx.save_for_backward(*map(storable, tensors), *flat)
        ctx.set_materialize_grads(False)
        fixed = [x for name, x in out.items() if not (x.is_floating_point() and has_gradient(name))]
        ctx.mark_non_differentiable(*fixed)
        return tuple(out.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_upstream(grads, NO_SECOND_DERIVATIVE)
        ctx.held.check()
        tensors = ctx.saved_tensors
        call = ctx.call.with_tensors(Inputs(*tensors[: len(Inputs._fields)]))
        saved = Saved.of(ctx.saved_names, list(tensors[len(Inputs._fields) :]))
        given = {name: g for name, g in zip(ctx.names, grads, strict=True) if g is not None}
        result = _drivers(call).gradients(call, ctx.price, saved, given, ctx.needs)
        return None, None, None, None, *result, *NOT_DIFFERENTIATED


def stats(call: Call) -> dict[str, Tensor]:
    """The wanted statistics, (N, ...) each, differentiable with respect to the first of `Inputs`."""
    call, valid = computing_all(call)
    needs = Needs.of(call.inputs)
    price = stats_price(call, needs)
    if price.method == "values" or not needs.any:
        drivers = _drivers(call)
        with torch.no_grad():
            return blank_ignored(drivers.values(drivers.checked(call, price), save=False)[0], valid)
    names: list[str] = []
    out = _Stats.apply(call, price, needs, names, *call.inputs)
    return blank_ignored(dict(zip(names, out, strict=True)), valid)


class FormedLoss:
    """A loss whose gradient exists already: given away once, formed by `again` afterwards."""

    def __init__(self, call: Call, total: GradientBuffers, again: Callable[[Call], GradientBuffers]) -> None:
        self.call, self.again, self.held = call.without_tensors(), again, Held(call)
        self.total: GradientBuffers | None = total

    def gradients(self, inputs: Inputs, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the differentiated inputs times the upstream gradient."""
        total, self.total = self.total, None
        if total is not None:
            return total.result(upstream)
        self.held.check()
        call = self.call.with_tensors(inputs)
        total = self.again(call)
        if call.options.sparse is not None:
            call.options.sparse.scale(upstream)
        return total.result(upstream)


def formed_again(needs: Needs, stat_grads: dict[str, Tensor], together: Together | None, call: Call) -> GradientBuffers:
    """A loss's gradient from its statistics' gradients: the same steps, so the same bits."""

    def known(rows: slice, stats: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: call.rows(g, rows) for name, g in stat_grads.items()}

    return loss_gradients(LossPass(call, needs, together, rounds=True), known)[0]


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, formed: FormedLoss, input_grads: Sequence[Tensor | None], loss: Tensor, *tensors: Any
    ) -> Tensor:
        ctx.formed, ctx.input_grads = formed, input_grads
        ctx.dtypes = [x.dtype for x in tensors[len(Inputs._fields) :]]
        ctx.save_for_backward(*map(storable, tensors[: len(Inputs._fields)]))
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_upstream((upstream,), NO_SECOND_DERIVATIVE)
        result = ctx.formed.gradients(Inputs(*ctx.saved_tensors), upstream)
        given = [
            None if g is None else (g * upstream).to(dtype)
            for g, dtype in zip(ctx.input_grads, ctx.dtypes, strict=True)
        ]
        return None, None, None, *result, *NOT_DIFFERENTIATED, *given


def attach(
    formed: FormedLoss,
    loss: Tensor,
    inputs: Inputs,
    extra: tuple[Tensor, ...] = (),
    extra_grads: Sequence[Tensor | None] = (),
) -> Tensor:
    """`loss` with a graph to the differentiated inputs and the loss function's own."""
    return _Attach.apply(formed, extra_grads, loss, *inputs, *extra)  # pyright: ignore[reportReturnType]
