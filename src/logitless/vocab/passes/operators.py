"""The pass as custom operators with fake kernels, so that `torch.compile(fullgraph=True)` goes through it.

What depends on the data (which tokens count) happens inside the operators; every output has a fixed shape. An
operator takes its tensors as a list of those that are there and flags that say which are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...algebra.costs import Price
from ...algebra.online_softmax import total_names
from ...algebra.stats import best_entries, has_gradient, sums_of
from ...errors import GradientError
from ...upstream import ONE_AT_A_TIME, check_upstream, refuse_duals
from ..call.call import DIFFERENTIATED, Call, Inputs, Needs, blank_ignored, computing_all
from ..call.options import CallOptions
from ..head.lm_head import LMHead
from ..head.shard import VocabShard, group_named
from .autograd import NO_SECOND_DERIVATIVE
from .engine import LossPass, Saved, checked, gradients, loss_gradients, outputs, values
from .gradient import summed_dtypes
from .loss import CrossEntropy, CrossEntropyOptions
from .price import by_registers, stats_price


def stats(call: Call) -> dict[str, Tensor]:
    """`autograd.stats` as one operator in a compiled graph."""
    out = torch.ops.logitless.stats(*_packed(call.inputs), _key(call), list(Needs.of(call.inputs)))
    pairs = zip(outputs(call), out, strict=False)
    return {name: x if has_gradient(name) else x.detach() for name, x in pairs}


def cross_entropy(call: Call, given: CrossEntropyOptions) -> Tensor:
    """`linear_cross_entropy` as one operator in a compiled graph."""
    tensors, present = _packed((*call.inputs, given.denominator))
    out = torch.ops.logitless.cross_entropy(
        tensors, present, _key(call), list(Needs.of(call.inputs)), given.smoothing, given.z_loss, given.mean
    )
    return out[0]


def _packed(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], list[bool]]:
    return [x for x in tensors if x is not None], [x is not None for x in tensors]


def _unpacked(tensors: Sequence[Tensor], present: Sequence[bool]) -> list[Any]:
    """Tensors in their places, None elsewhere."""
    rest = iter(tensors)
    return [next(rest) if there else None for there in present]


def _key(call: Call) -> str:
    """What an operator is told of a call beside its tensors, by name: options, heads and shard.

    Numbers of a head are converted: dynamo may have symbols for those of one that was made outside of the graph.
    """
    o = call.options
    said = (
        f"want={'+'.join(o.want)};temperature={o.temperature};ignore_index={o.ignore_index};top_k={o.top_k};"
        f"jsd_beta={o.jsd_beta};memory_budget={o.memory_budget};backend={o.backend};named={o.named};"
        f"autocast={'' if o.autocast is None else str(o.autocast).removeprefix('torch.')};{_of_head('head', call.head)}"
    )
    if call.reference is not None:
        said += f";{_of_head('reference', call.reference)}"
    if call.shard is not None:
        said += f";alike={call.alike}"
        said += f";group={call.shard.name};offset={int(call.shard.offset)};total={int(call.shard.total)}"
    return said


def _of_head(name: str, head: LMHead) -> str:
    return f"{name}={float(head.scale)},{float(head.softcap or 0.0)},{int(head.vocab_size or 0)}"


def _call_of(key: str, inputs: Inputs) -> Call:
    """The call whose `_key` this is, on an operator's tensors."""
    said = dict(part.split("=", 1) for part in key.split(";"))
    shard = None
    if "group" in said:
        shard = VocabShard(group_named(said["group"]), int(said["offset"]), int(said["total"]))

    def head(name: str, weight: Tensor, bias: Tensor | None) -> LMHead:
        scale, softcap, rows = said[name].split(",")
        return LMHead(weight, bias, float(scale), float(softcap) or None, int(rows) or None, shard=shard)

    options = CallOptions(
        want=tuple(filter(None, said["want"].split("+"))),
        temperature=float(said["temperature"]),
        ignore_index=int(said["ignore_index"]),
        top_k=int(said["top_k"]),
        jsd_beta=float(said["jsd_beta"]),
        memory_budget=int(said["memory_budget"]),
        backend=said["backend"],
        named=said["named"] == "True",
        autocast=getattr(torch, said["autocast"]) if said["autocast"] else None,
    )
    assert inputs.weight is not None  # a quantised head breaks the graph before
    reference = None if inputs.ref_weight is None else head("reference", inputs.ref_weight, inputs.ref_bias)
    return Call(options, head("head", inputs.weight, inputs.bias), inputs, reference, alike=said.get("alike", ""))


class _Operator(NamedTuple):
    """What an operator's flat arguments say; `rest` are the tensors after the inputs."""

    call: Call
    needs: Needs
    price: Price
    rest: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], present: Sequence[bool], key: str, flags: Sequence[bool]) -> _Operator:
        inputs = Inputs(*_unpacked(tensors, present[: len(Inputs._fields)]))
        call, needs = _call_of(key, inputs), Needs(*flags)
        rest = list(tensors[sum(x is not None for x in inputs) :])
        return cls(call, needs, stats_price(call, needs), rest)

    def computed(self, formed: bool) -> tuple[Call, Tensor | None]:
        """`computing_all` of the call, by the backend that it would have had outside of the graph."""
        return computing_all(by_registers(self.call, self.needs, formed))

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, trailing shape and dtype of all that backward needs beside the inputs."""
        options, i, real = self.call.options, self.call.inputs, self.call.compute
        if self.price.method == "values":
            return []
        sums = sums_of(options.want)
        out: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            (f"totals.{name}", (), torch.int64 if name == "rank" else real)
            for name in total_names(sums, i.labels is not None)
        ]
        k = best_entries(sums, options.top_k)
        if k:
            out += [("extra.top_ids", (k,), torch.int64), ("extra.top_logits", (k,), real)]
        if i.candidates is not None and self.call.head.softcap:
            out.append(("extra.candidate_logits", (i.candidates.shape[1],), real))
        return out + [(f"products.{basis}", (i.width,), real) for basis in self.price.bases]

    def blank(self) -> list[Tensor]:
        """Outputs, and what backward needs, with nothing in them."""
        hidden = self.call.inputs.hidden
        shapes = [*outputs(self.call).values(), *((shape, dtype) for _, shape, dtype in self.layout)]
        return [hidden.new_empty((hidden.shape[0], *shape), dtype=dtype) for shape, dtype in shapes]

    def own(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients that there are, in the dtypes that `blank_gradients` says."""
        pairs = zip(gradients, self.call.inputs[:DIFFERENTIATED], strict=True)
        return [x.to(i.dtype) for x, i in pairs if x is not None and i is not None]

    def blank_gradients(self, summed: bool = False) -> list[Tensor]:
        """The gradients that there are, with nothing in them; summed: in the dtypes that they are summed in."""
        pairs = zip(self.call.inputs[:DIFFERENTIATED], self.needs, summed_dtypes(self.call), strict=True)
        return [
            torch.empty_like(x, dtype=dtype if summed else x.dtype)
            for x, wanted, dtype in pairs
            if wanted and x is not None
        ]


def _spread(result: Sequence[Tensor], flags: Sequence[bool], n_tensors: int, present: Sequence[bool]) -> list[Any]:
    """The gradients in the places of an operator's tensors."""
    placed = _unpacked(result, flags)
    there = [g for g, has in zip(placed, present, strict=False) if has]
    return there + [None] * (n_tensors - len(there))


@torch.library.custom_op("logitless::stats", mutates_args=())
def _stats(tensors: Sequence[Tensor], present: Sequence[bool], key: str, flags: Sequence[bool]) -> list[Tensor]:
    refuse_duals(*tensors)
    said = _Operator.of(tensors, present, key, flags)
    call, valid = said.computed(formed=False)
    out, saved = values(checked(call.agree(), said.price), save=said.price.method != "values")
    out = blank_ignored(out, valid)
    parts = dict(zip(*saved.flat(), strict=True))
    hidden = call.inputs.hidden
    for_backward = [
        parts[name].clone() if name in parts else hidden.new_zeros((hidden.shape[0], *shape), dtype=dtype)
        for name, shape, dtype in said.layout
    ]
    return [*(out[name].clone() for name in outputs(call)), *for_backward]


@_stats.register_fake
def _(tensors: Sequence[Tensor], present: Sequence[bool], key: str, flags: Sequence[bool]) -> list[Tensor]:
    return _Operator.of(tensors, present, key, flags).blank()


@torch.library.custom_op("logitless::stats_backward", mutates_args=())
def _stats_backward(
    tensors: Sequence[Tensor],
    present: Sequence[bool],
    grads: Sequence[Tensor],
    given: Sequence[bool],
    key: str,
    flags: Sequence[bool],
) -> list[Tensor]:
    said = _Operator.of(tensors, present, key, flags)
    saved = Saved.of([name for name, _, _ in said.layout], said.rest)
    names = [name for name, there in zip(outputs(said.call), given, strict=True) if there]
    call, valid = said.computed(formed=False)
    upstream = blank_ignored(dict(zip(names, grads, strict=True)), valid)
    call = call.agree().valid_alone()  # on which rows each rank has: a graph keeps tensors alone
    return said.own(gradients(call, said.price, saved, upstream, said.needs))


@_stats_backward.register_fake
def _(
    tensors: Sequence[Tensor],
    present: Sequence[bool],
    grads: Sequence[Tensor],
    given: Sequence[bool],
    key: str,
    flags: Sequence[bool],
) -> list[Tensor]:
    return _Operator.of(tensors, present, key, flags).blank_gradients()


def _refuse_many(*_: Any) -> NoReturn:
    raise GradientError(ONE_AT_A_TIME)


_stats_backward.register_vmap(_refuse_many)
_OF_BATCHES = torch.library.Library("logitless", "FRAGMENT")  # registered for as long as it lives
_OF_BATCHES.impl("stats_backward", _refuse_many, "Batched")  # which is_grads_batched uses


def _stats_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.present, ctx.key, ctx.flags = inputs
    ctx.n_tensors, ctx.n_outputs = len(tensors), len(outputs(_Operator.of(tensors, *inputs[1:]).call))
    ctx.save_for_backward(*tensors, *output[ctx.n_outputs :])


def _stats_grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    if not torch.compiler.is_compiling():
        check_upstream(grads, NO_SECOND_DERIVATIVE)
    upstream = grads[: ctx.n_outputs]
    given = [g is not None and g.is_floating_point() for g in upstream]
    result = torch.ops.logitless.stats_backward(
        list(ctx.saved_tensors),
        ctx.present,
        [g for g, there in zip(upstream, given, strict=True) if there],
        given,
        ctx.key,
        ctx.flags,
    )
    return _spread(result, ctx.flags, ctx.n_tensors, ctx.present), None, None, None


_stats.register_autograd(_stats_grad, setup_context=_stats_setup)


@torch.library.custom_op("logitless::cross_entropy", mutates_args=())
def _cross_entropy(
    tensors: Sequence[Tensor],
    present: Sequence[bool],
    key: str,
    flags: Sequence[bool],
    label_smoothing: float,
    z_loss: float,
    mean: bool,
) -> list[Tensor]:
    refuse_duals(*tensors)
    said = _Operator.of(tensors, present, key, flags)
    call, valid = said.computed(formed=True)
    call = call.agree(*said.rest).checked()
    (denominator,) = _unpacked(said.rest, present[len(Inputs._fields) :])
    given = CrossEntropyOptions(label_smoothing, z_loss, mean, denominator)
    evaluate = CrossEntropy(call, given, valid)
    total, _ = loss_gradients(LossPass(call, said.needs), evaluate)
    return [evaluate.total, *(x for x in total.summed() if x is not None)]


@_cross_entropy.register_fake
def _(
    tensors: Sequence[Tensor],
    present: Sequence[bool],
    key: str,
    flags: Sequence[bool],
    label_smoothing: float,
    z_loss: float,
    mean: bool,
) -> list[Tensor]:
    said = _Operator.of(tensors, present, key, flags)
    scalar = said.call.inputs.hidden.new_empty((), dtype=said.call.compute)
    return [scalar, *said.blank_gradients(summed=True)]


def _cross_entropy_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.n_tensors, ctx.present, ctx.flags = len(inputs[0]), inputs[1], inputs[3]
    pairs = zip(_unpacked(inputs[0], ctx.present), ctx.flags, strict=False)
    ctx.dtypes = [x.dtype for x, wanted in pairs if wanted]
    ctx.save_for_backward(*output[1:])


def _cross_entropy_grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    if not torch.compiler.is_compiling():
        check_upstream((grads[0],), NO_SECOND_DERIVATIVE)
    scaled = [(x * grads[0]).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
    return _spread(scaled, ctx.flags, ctx.n_tensors, ctx.present), *([None] * 6)


_cross_entropy.register_autograd(_cross_entropy_grad, setup_context=_cross_entropy_setup)
