"""The pass as custom operators with fake kernels, so that `torch.compile(fullgraph=True)` goes through it.

What depends on the data (which tokens count) happens inside the operators; every output has a fixed shape. An
operator takes its tensors as a list of those that are there and flags that say which are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...algebra.costs import Price
from ...algebra.fold import total_names
from ...algebra.stats import sums_of
from ..call.call import DIFFERENTIATED, Inputs, Needs, Problem, Spec, compute_dtype, hidden_where_ignored, settled
from .autograd import needs_of, stats_price
from .engine import Saved, gradients, loss_gradients, outputs, values
from .loss import CrossEntropy, reduction_scale


def stats(spec: Spec, inputs: Inputs) -> dict[str, Tensor]:
    """`autograd.stats` as one operator in a compiled graph."""
    out = torch.ops.logitless.stats(*_packed(inputs), spec.key, needs_of(inputs).flags)
    return dict(zip(outputs(spec, inputs), out, strict=False))


def cross_entropy(
    spec: Spec, inputs: Inputs, label_smoothing: float, z_loss: float, mean: bool, denominator: Tensor | None
) -> Tensor:
    """`linear_cross_entropy` as one operator in a compiled graph."""
    tensors, present = _packed((*inputs, denominator))
    out = torch.ops.logitless.cross_entropy(
        tensors, present, spec.key, needs_of(inputs).flags, float(label_smoothing), float(z_loss), mean
    )
    return out[0]


def _packed(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], list[bool]]:
    return [x for x in tensors if x is not None], [x is not None for x in tensors]


def _unpacked(tensors: Sequence[Tensor], present: Sequence[bool]) -> list[Any]:
    """Tensors in their places, None elsewhere."""
    rest = iter(tensors)
    return [next(rest) if there else None for there in present]


class _Call(NamedTuple):
    """What an operator's flat arguments say; `rest` are the tensors after the inputs."""

    spec: Spec
    inputs: Inputs
    needs: Needs
    price: Price
    rest: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], present: Sequence[bool], key: str, flags: Sequence[bool]) -> _Call:
        spec, needs = Spec.parse(key), Needs(*flags)
        inputs = Inputs(*_unpacked(tensors, present[: len(Inputs._fields)]))
        rest = list(tensors[sum(x is not None for x in inputs) :])
        return cls(spec, inputs, needs, stats_price(spec, inputs, needs), rest)

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, trailing shape and dtype of all that backward needs beside the inputs."""
        spec, i = self.spec, self.inputs
        if self.price.method == "values":
            return []
        real, sums = compute_dtype(i.hidden), sums_of(spec.want)
        out: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            (f"totals.{name}", (), torch.int64 if name == "rank" else real)
            for name in total_names(sums, i.labels is not None)
        ]
        k = max(spec.top_k, int("argmax" in sums))
        if k:
            out += [("extra.top_ids", (k,), torch.int64), ("extra.top_logits", (k,), real)]
        if i.candidates is not None and spec.softcap:
            out.append(("extra.candidate_logits", (i.candidates.shape[1],), real))
        width = i.hidden.shape[1] + (0 if i.up is None else i.up.shape[1])
        return out + [(f"products.{basis}", (width,), real) for basis in self.price.bases]

    def blank(self) -> list[Tensor]:
        """Outputs, and what backward needs, with nothing in them."""
        hidden = self.inputs.hidden
        shapes = [*outputs(self.spec, self.inputs).values(), *((shape, dtype) for _, shape, dtype in self.layout)]
        return [hidden.new_empty((hidden.shape[0], *shape), dtype=dtype) for shape, dtype in shapes]

    def own(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients that there are, in the dtypes that `blank_gradients` says."""
        pairs = zip(gradients, self.inputs[:DIFFERENTIATED], strict=True)
        return [x.to(i.dtype) for x, i in pairs if x is not None and i is not None]

    def blank_gradients(self) -> list[Tensor]:
        pairs = zip(self.inputs[:DIFFERENTIATED], self.needs.flags, strict=True)
        return [torch.empty_like(x) for x, wanted in pairs if wanted and x is not None]


def _spread(result: Sequence[Tensor], flags: Sequence[bool], n_tensors: int, present: Sequence[bool]) -> list[Any]:
    """The gradients in the places of an operator's tensors."""
    placed = _unpacked(result, flags)
    there = [g for g, has in zip(placed, present, strict=False) if has]
    return there + [None] * (n_tensors - len(there))


@torch.library.custom_op("logitless::stats", mutates_args=())
def _stats(tensors: Sequence[Tensor], present: Sequence[bool], key: str, flags: Sequence[bool]) -> list[Tensor]:
    call = _Call.of(tensors, present, key, flags)
    inputs, counted = settled(call.spec, call.inputs)
    out, saved = values(Problem.met(call.spec, inputs), call.price, save=call.price.method != "values")
    out = hidden_where_ignored(out, counted)
    parts = dict(zip(*saved.flat(), strict=True))
    n = call.inputs.hidden.shape[0]
    kept = [
        parts[name].clone() if name in parts else call.inputs.hidden.new_zeros((n, *shape), dtype=dtype)
        for name, shape, dtype in call.layout
    ]
    return [*(out[name].clone() for name in outputs(call.spec, call.inputs)), *kept]


@_stats.register_fake
def _(tensors: Sequence[Tensor], present: Sequence[bool], key: str, flags: Sequence[bool]) -> list[Tensor]:
    return _Call.of(tensors, present, key, flags).blank()


@torch.library.custom_op("logitless::stats_backward", mutates_args=())
def _stats_backward(
    tensors: Sequence[Tensor], present: Sequence[bool], grads: Sequence[Tensor], given: Sequence[bool], key: str,
    flags: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    call = _Call.of(tensors, present, key, flags)
    saved = Saved.of([name for name, _, _ in call.layout], call.rest)
    names = [name for name, there in zip(outputs(call.spec, call.inputs), given, strict=True) if there]
    inputs, counted = settled(call.spec, call.inputs)
    up = hidden_where_ignored(dict(zip(names, grads, strict=True)), counted)
    result = gradients(Problem.of(call.spec, inputs), call.price, saved, up, call.needs)
    return call.own(result)


@_stats_backward.register_fake
def _(
    tensors: Sequence[Tensor], present: Sequence[bool], grads: Sequence[Tensor], given: Sequence[bool], key: str,
    flags: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    return _Call.of(tensors, present, key, flags).blank_gradients()


def _stats_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.present, ctx.key, ctx.flags = inputs
    call = _Call.of(tensors, *inputs[1:])
    ctx.n_tensors, ctx.n_outputs = len(tensors), len(outputs(call.spec, call.inputs))
    ctx.save_for_backward(*tensors, *output[ctx.n_outputs :])


def _stats_grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    upstream = grads[: ctx.n_outputs]
    given = [g is not None and g.is_floating_point() for g in upstream]
    result = torch.ops.logitless.stats_backward(
        list(ctx.saved_tensors), ctx.present, [g for g, there in zip(upstream, given, strict=True) if there], given,
        ctx.key, ctx.flags,
    )  # fmt: skip
    return _spread(result, ctx.flags, ctx.n_tensors, ctx.present), None, None, None


_stats.register_autograd(_stats_grad, setup_context=_stats_setup)


@torch.library.custom_op("logitless::cross_entropy", mutates_args=())
def _cross_entropy(
    tensors: Sequence[Tensor], present: Sequence[bool], key: str, flags: Sequence[bool], label_smoothing: float,
    z_loss: float, mean: bool,
) -> list[Tensor]:  # fmt: skip
    call = _Call.of(tensors, present, key, flags)
    inputs, counted = settled(call.spec, call.inputs)
    problem = Problem.met(call.spec, inputs)
    denominator = call.rest[0] if call.rest else None
    evaluate = CrossEntropy(label_smoothing, z_loss, reduction_scale(problem, mean, denominator, counted))
    total, _, _ = loss_gradients(problem, call.needs, evaluate)
    return [evaluate.total, *call.own(total.result())]


@_cross_entropy.register_fake
def _(
    tensors: Sequence[Tensor], present: Sequence[bool], key: str, flags: Sequence[bool], label_smoothing: float,
    z_loss: float, mean: bool,
) -> list[Tensor]:  # fmt: skip
    call = _Call.of(tensors, present, key, flags)
    hidden = call.inputs.hidden
    return [hidden.new_empty((), dtype=compute_dtype(hidden)), *call.blank_gradients()]


def _cross_entropy_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.n_tensors, ctx.present, ctx.flags = len(inputs[0]), inputs[1], inputs[3]
    ctx.save_for_backward(*output[1:])


def _cross_entropy_grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    scaled = [(x * grads[0]).to(x.dtype) for x in ctx.saved_tensors]
    return _spread(scaled, ctx.flags, ctx.n_tensors, ctx.present), *([None] * 6)


_cross_entropy.register_autograd(_cross_entropy_grad, setup_context=_cross_entropy_setup)
