"""The pass as autograd nodes: `stats` for any upstream gradient, `attach` for a loss with its gradient formed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...algebra.costs import Price, price_of
from ...errors import GradientError
from ..call.call import DIFFERENTIATED, Inputs, Needs, Problem, Spec, hidden_where_ignored, settled
from .engine import Saved, gradients, values
from .gradient import Accumulator

NO_SECOND_DERIVATIVE = (
    "logitless: expected a first-order backward, got create_graph=True; second derivatives of the vocabulary pass "
    "are not defined: use the dense oracle (logitless.vocab.reference) for them"
)


def needs_of(inputs: Inputs) -> Needs:
    """Which gradients autograd will ask for, read outside of any Function."""
    if not torch.is_grad_enabled():
        return Needs()
    return Needs(*(x is not None and x.requires_grad for x in inputs[:DIFFERENTIATED]))


def grads_of(needs: Needs) -> dict[str, bool]:
    """`price_of`'s arguments: the adapters' gradients need the slopes of all entries, as a bias does."""
    slopes = needs.bias or needs.up or (needs.low and not needs.hidden)
    return {"hidden_grad": needs.hidden, "weight_grad": needs.weight, "bias_grad": slopes}


def stats_price(spec: Spec, inputs: Inputs, needs: Needs) -> Price:
    """What `token_stats` pays."""
    return price_of(
        spec.want,
        **grads_of(needs),
        one_hots=bool(spec.top_k) or inputs.candidates is not None,
        softcap=bool(spec.softcap),
    )


class _Stats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: Spec, price: Price, needs: Needs, names: list[str], *tensors: Any) -> Any:
        inputs = Inputs(*tensors)
        problem = Problem.checked(spec, inputs)
        out, saved = values(problem, price, save=True)
        names.extend(out)
        ctx.spec, ctx.index, ctx.price, ctx.needs, ctx.names = spec, problem.index, price, needs, names
        ctx.saved_names, flat = saved.flat()
        ctx.save_for_backward(*inputs, *flat)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in out.values() if not x.is_floating_point()))
        return tuple(out.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise GradientError(NO_SECOND_DERIVATIVE)
        tensors = ctx.saved_tensors
        inputs = Inputs(*tensors[: len(Inputs._fields)])
        saved = Saved.of(ctx.saved_names, list(tensors[len(Inputs._fields) :]))
        given = {name: g for name, g in zip(ctx.names, grads, strict=True) if g is not None}
        result = gradients(Problem(ctx.spec, inputs, ctx.index), ctx.price, saved, given, ctx.needs)
        return None, None, None, None, *result, *([None] * (len(Inputs._fields) - DIFFERENTIATED))


def stats(spec: Spec, inputs: Inputs) -> dict[str, Tensor]:
    """The wanted statistics, (N, ...) each, differentiable with respect to hidden, weight, bias, low and up."""
    inputs, counted = settled(spec, inputs)
    needs = needs_of(inputs)
    price = stats_price(spec, inputs, needs)
    if price.method == "values":
        with torch.no_grad():
            return hidden_where_ignored(values(Problem.checked(spec, inputs), price, save=False)[0], counted)
    names: list[str] = []
    out = _Stats.apply(spec, price, needs, names, *inputs)
    return hidden_where_ignored(dict(zip(names, out, strict=True)), counted)


class FormedLoss:
    """A loss whose gradient exists already: given away once, recomputed from per-token coefficients afterwards."""

    def __init__(
        self,
        spec: Spec,
        index: Tensor | None,
        needs: Needs,
        total: Accumulator,
        saved: Saved,
        stat_grads: dict[str, Tensor],
    ) -> None:
        self.spec, self.index, self.needs = spec, index, needs
        self.saved, self.stat_grads = saved, stat_grads
        self.total: Accumulator | None = total

    def gradients(self, inputs: Inputs, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """(dhidden, dweight, dbias, dlow, dup) times the upstream gradient."""
        total, self.total = self.total, None
        if total is not None:
            total.scale_(upstream)
            return total.result()
        problem = Problem(self.spec, inputs, self.index)
        scaled = {name: g * upstream for name, g in self.stat_grads.items()}
        return gradients(problem, Price("recompute", 0, whole_rows=True), self.saved, scaled, self.needs)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, formed: FormedLoss, input_grads: list[Tensor | None], loss: Tensor, *tensors: Any) -> Tensor:
        ctx.formed, ctx.input_grads = formed, input_grads
        ctx.dtypes = [x.dtype for x in tensors[len(Inputs._fields) :]]
        ctx.save_for_backward(*tensors[: len(Inputs._fields)])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise GradientError(NO_SECOND_DERIVATIVE)
        result = ctx.formed.gradients(Inputs(*ctx.saved_tensors), upstream)
        others = [None] * (len(Inputs._fields) - DIFFERENTIATED)
        given = [
            None if g is None else (g * upstream).to(dtype)
            for g, dtype in zip(ctx.input_grads, ctx.dtypes, strict=True)
        ]
        return None, None, None, *result, *others, *given


def attach(
    formed: FormedLoss,
    loss: Tensor,
    inputs: Inputs,
    extra: tuple[Tensor, ...],
    extra_grads: list[Tensor | None],
) -> Tensor:
    """`loss` with a graph to the differentiated inputs and the loss function's own."""
    return _Attach.apply(formed, extra_grads, loss, *inputs, *extra)  # pyright: ignore[reportReturnType]
