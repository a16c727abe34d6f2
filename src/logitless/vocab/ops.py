"""The pass as custom operators with fake kernels, so that `torch.compile(fullgraph=True)` goes through it.

What depends on the data (which tokens count) happens inside the operators; every output has a fixed shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..algebra.costs import Price
from ..algebra.fold import total_names
from ..algebra.stats import sums_of
from .autograd import needs_of, stats_price
from .engine import Needs, Saved, gradients, loss_gradients, outputs, values
from .loss import CrossEntropy, reduction_scale
from .problem import Inputs, Problem, Spec, compute_dtype

Optional = Tensor | None


def stats(spec: Spec, inputs: Inputs) -> dict[str, Tensor]:
    """`autograd.stats` as one operator in a compiled graph."""
    needs = needs_of(inputs)
    flags = [needs.hidden, needs.weight, needs.bias]
    out = torch.ops.logitless.stats(*inputs, spec.key, flags)
    return dict(zip(outputs(spec, inputs), out, strict=False))


def cross_entropy(
    spec: Spec, inputs: Inputs, label_smoothing: float, z_loss: float, mean: bool, denominator: Tensor | None
) -> Tensor:
    """`linear_cross_entropy` as one operator in a compiled graph."""
    needs = needs_of(inputs)
    flags = [needs.hidden, needs.weight, needs.bias]
    out = torch.ops.logitless.cross_entropy(
        *inputs[:5], denominator, spec.key, flags, float(label_smoothing), float(z_loss), mean
    )
    return out[0]


def _layout(spec: Spec, inputs: Inputs, price: Price) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, trailing shape and dtype of all that backward needs beside the inputs."""
    real = compute_dtype(inputs.hidden)
    sums = sums_of(spec.want)
    out: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        (f"totals.{name}", (), torch.int64 if name == "rank" else real)
        for name in total_names(sums, inputs.labels is not None)
    ]
    k = max(spec.top_k, int("argmax" in sums))
    if k:
        out += [("extra.top_ids", (k,), torch.int64), ("extra.top_logits", (k,), real)]
    if inputs.candidates is not None and spec.softcap:
        out.append(("extra.candidate_logits", (inputs.candidates.shape[1],), real))
    return out + [(f"products.{basis}", (inputs.hidden.shape[1],), real) for basis in price.bases]


@torch.library.custom_op("logitless::stats", mutates_args=())
def _stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional,
    labels: Optional,
    temperature: Optional,
    candidates: Optional,
    ref_hidden: Optional,
    ref_weight: Optional,
    ref_bias: Optional,
    key: str,
    flags: Sequence[bool],
) -> list[Tensor]:
    spec, needs = Spec.parse(key), Needs(*flags)
    inputs = Inputs(hidden, weight, bias, labels, temperature, candidates, ref_hidden, ref_weight, ref_bias)
    price = stats_price(spec, inputs, needs)
    problem = Problem.checked(spec, inputs)
    out, saved = values(problem, price, save=price.method != "values")
    if price.method == "values":
        return [out[name] for name in outputs(spec, inputs)]
    parts = dict(zip(*saved.flat(), strict=True))
    n = hidden.shape[0]
    kept = [
        parts[name].clone() if name in parts else hidden.new_zeros((n, *shape), dtype=dtype)
        for name, shape, dtype in _layout(spec, inputs, price)
    ]
    return [*(out[name].clone() for name in outputs(spec, inputs)), *kept]


@_stats.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional,
    labels: Optional,
    temperature: Optional,
    candidates: Optional,
    ref_hidden: Optional,
    ref_weight: Optional,
    ref_bias: Optional,
    key: str,
    flags: Sequence[bool],
) -> list[Tensor]:
    spec, needs = Spec.parse(key), Needs(*flags)
    inputs = Inputs(hidden, weight, bias, labels, temperature, candidates, ref_hidden, ref_weight, ref_bias)
    price = stats_price(spec, inputs, needs)
    n = hidden.shape[0]
    out = [hidden.new_empty((n, *shape), dtype=dtype) for shape, dtype in outputs(spec, inputs).values()]
    if price.method == "values":
        return out
    return out + [hidden.new_empty((n, *shape), dtype=dtype) for _, shape, dtype in _layout(spec, inputs, price)]


@torch.library.custom_op("logitless::stats_backward", mutates_args=())
def _stats_backward(
    tensors: Sequence[Tensor], present: Sequence[bool], grads: Sequence[Tensor], given: Sequence[bool], key: str,
    flags: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    spec, needs = Spec.parse(key), Needs(*flags)
    rest = iter(tensors)
    inputs = Inputs(*(next(rest) if there else None for there in present))  # type: ignore[arg-type]
    price = stats_price(spec, inputs, needs)
    saved = Saved.of([name for name, _, _ in _layout(spec, inputs, price)], list(rest))
    names = [name for name, there in zip(outputs(spec, inputs), given, strict=True) if there]
    result = gradients(Problem.of(spec, inputs), price, saved, dict(zip(names, grads, strict=True)), needs)
    return [x for x in result if x is not None]


@_stats_backward.register_fake
def _(
    tensors: Sequence[Tensor], present: Sequence[bool], grads: Sequence[Tensor], given: Sequence[bool], key: str,
    flags: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    return _like_inputs(tensors, present, flags)


def _like_inputs(tensors: Sequence[Tensor], present: Sequence[bool], flags: Sequence[bool]) -> list[Tensor]:
    """Empty gradients of hidden, weight and bias, those that `flags` ask for."""
    rest = iter(tensors)
    first = [next(rest) if there else None for there in present[:3]]
    return [torch.empty_like(x) for x, want in zip(first, flags, strict=True) if want and x is not None]


def _spread(result: Sequence[Tensor], flags: Sequence[bool]) -> list[Tensor | None]:
    rest = iter(result)
    return [next(rest) if want else None for want in flags]


def _stats_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, key, flags = inputs
    ctx.key, ctx.flags = key, list(flags)
    ctx.n_outputs = len(outputs(Spec.parse(key), Inputs(*tensors)))
    ctx.present = [x is not None for x in tensors]
    ctx.save_for_backward(*(x for x in tensors if x is not None), *output[ctx.n_outputs :])


def _stats_grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    upstream = grads[: ctx.n_outputs]
    given = [g is not None and g.is_floating_point() for g in upstream]
    result = torch.ops.logitless.stats_backward(
        list(ctx.saved_tensors), ctx.present, [g for g, there in zip(upstream, given, strict=True) if there], given,
        ctx.key, ctx.flags,
    )  # fmt: skip
    return (*_spread(result, ctx.flags), *([None] * 8))


_stats.register_autograd(_stats_grad, setup_context=_stats_setup)


@torch.library.custom_op("logitless::cross_entropy", mutates_args=())
def _cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Optional, labels: Tensor, temperature: Optional, denominator: Optional,
    key: str, flags: Sequence[bool], label_smoothing: float, z_loss: float, mean: bool,
) -> list[Tensor]:  # fmt: skip
    problem = Problem.checked(Spec.parse(key), Inputs(hidden, weight, bias, labels, temperature))
    evaluate = CrossEntropy(label_smoothing, z_loss, reduction_scale(problem, mean, denominator))
    total, _, _ = loss_gradients(problem, Needs(*flags), evaluate)
    return [evaluate.total, *(x for x in total.result() if x is not None)]


@_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Optional, labels: Tensor, temperature: Optional, denominator: Optional,
    key: str, flags: Sequence[bool], label_smoothing: float, z_loss: float, mean: bool,
) -> list[Tensor]:  # fmt: skip
    loss = hidden.new_empty((), dtype=compute_dtype(hidden))
    inputs = (hidden, weight, bias)
    return [
        loss,
        *(torch.empty_like(x) for x, want in zip(inputs, flags, strict=True) if want and x is not None),
    ]


def _cross_entropy_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.flags = list(inputs[7])
    ctx.save_for_backward(*output[1:])


def _cross_entropy_grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    upstream = grads[0]
    scaled = [(x * upstream).to(x.dtype) for x in ctx.saved_tensors]
    return (*_spread(scaled, ctx.flags), *([None] * 8))


_cross_entropy.register_autograd(_cross_entropy_grad, setup_context=_cross_entropy_setup)
