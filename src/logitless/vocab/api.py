"""The public functions of the pass."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor

from ..algebra.options import check_cross_entropy, check_reduction
from ..algebra.stats import cross_entropy_wants
from ..errors import DeviceError, DtypeError, OptionError, ShapeError
from .call import quack_support
from .call.call import Call, Needs
from .call.lora import agreed, with_lora
from .call.options import Options
from .call.rows_of_reference import RowSource
from .call.sampling_mask import SamplingMask
from .call.validate import (
    check_hidden,
    check_loss,
    check_loss_fn,
    divisor_of,
    flatten,
    flatten_inputs,
    flatten_whole_loss,
    is_draft,
)
from .dtypes import compute_dtype, dtype_of
from .explain import Explanation, explain
from .head.lm_head import LMHead
from .passes import operators, quack
from .passes.autograd import stats
from .passes.loss import (
    CrossEntropyOptions,
    LossFn,
    chunked_cross_entropy,
    chunked_loss,
    cross_entropy_of,
    label_weights,
    loss_of_each,
    loss_over_sets,
)
from .passes.outside import with_outside
from .passes.price import by_registers
from .ranks.agreement import on_all
from .stats import TokenStats

CROSS_ENTROPY_OPTIONS = ("temperature", "ignore_index", "memory_budget", "backend")
CROSS_ENTROPY_NAMES = ("weight", "reduction", "label_smoothing", "z_loss", "denominator", *CROSS_ENTROPY_OPTIONS)
BREAKS = (
    "logitless: token_loss, a sampling_mask, a reference's logits, a draft's head beside its target's, backend "
    "'compiled' or 'quack', a SparseBackward and a quantised head break the graph, expected none of them with "
    "fullgraph=True; leave that out"
)
F = TypeVar("F", bound=Callable[..., Any])
__all__ = ["Explanation", "TokenStats", "explain", "linear_cross_entropy", "token_loss", "token_stats"]


def token_stats(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    labels: Tensor | None = None,  # (...)
    *,
    want: tuple[str, ...] = ("logprob",),
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    top_k: int = 0,
    candidates: Tensor | None = None,  # (..., K)
    sampling_mask: SamplingMask | None = None,
    reference: tuple[Tensor, LMHead] | Tensor | RowSource | None = None,
    jsd_beta: float = 0.5,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> TokenStats:
    """Any per-token statistics of the head's distribution, in one pass over the vocabulary, without its logits.

    Dense equivalent:

        z = softcap(scale * F.linear(hidden, weight, bias)) / temperature  # and the head's adapters
        logp = z.log_softmax(-1)
        logprob = logp.gather(-1, labels[..., None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)  # and so on, see docs/statistics

    hidden: (..., H); labels: (...) integer, not shifted: labels[i] is the target of hidden[i]; temperature: broadcasts
    to (...), in 1e-24..1e26, divides the reference's logits, too; candidates: (..., K) ids whose logits are wanted;
    sampling_mask: each token's entries, which all statistics are over, at no product with the vocabulary; reference:
    (hidden, head) of the policy that kl, jsd and others compare with, a constant; or its logits or log-probs (..., V),
    read by slices, or reference(tokens, entries) -> (n, entries) of such rows; jsd_beta: its weight in jsd's mixture;
    memory_budget: bytes of slices, 256 MiB unless given, up to 1 GiB on a GPU. Returns fp32 (fp64 for fp64 inputs)
    tensors (...), differentiable with respect to hidden, weight, bias and the adapters' factors, not temperature, rank,
    el2n and top_k_ids. Ignored tokens get 0 and no gradient. Raises ShapeError, DtypeError, DeviceError, LabelError,
    OptionError, BackendError, GradientError. Memory: slices within the budget, O(N), two (N, H) if frozen.
    """
    return _token_stats(
        hidden,
        head,
        labels,
        want=want,
        temperature=temperature,
        ignore_index=ignore_index,
        top_k=top_k,
        candidates=candidates,
        sampling_mask=sampling_mask,
        reference=reference,
        jsd_beta=jsd_beta,
        memory_budget=memory_budget,
        backend=backend,
    )


def _uncompiled(function: F) -> F:
    """`function` as one graph break under torch.compile."""
    return torch.compiler.disable(function, reason=BREAKS)  # pyright: ignore[reportReturnType]


def _breaks_graphs(head: LMHead, options: Options) -> bool:
    """Whether no graph of torch.compile can hold a call: it decodes rows, or reads an object of the caller's."""
    reference = options.get("reference")
    rows = reference is not None and not isinstance(reference, tuple)
    others = reference[-1:] if isinstance(reference, tuple) else ()
    heads = [x for x in (head, *others) if isinstance(x, LMHead)]
    quantised = any(x.weight_tensor is None for x in heads)
    drafted = len(heads) == 2 and is_draft(*heads)
    sparse = torch.is_grad_enabled() and getattr(head, "sparse", None) is not None
    return rows or quantised or drafted or sparse or options.get("sampling_mask") is not None


@_uncompiled
def token_loss(
    loss_fn: LossFn,
    hidden: Tensor,  # (..., H)
    head: LMHead,
    labels: Tensor | None = None,  # (...)
    *,
    inputs: tuple[Tensor, ...] = (),
    reduction: str = "mean",
    per: str = "token",
    **options: Unpack[Options],
) -> Tensor:
    """A loss that is a function of tokens' statistics, with its gradient formed in the forward pass: 3 GEMMs.

    Dense equivalent:

        stats = token_stats(hidden, head, labels, **options)
        loss_fn(stats, *inputs)[labels != ignore_index].mean()  # per="token"
        loss_fn(stats, *inputs)[(labels != ignore_index).flatten(1).any(1)].mean()  # per="sequence"

    loss_fn(stats, *inputs) sees some tokens' statistics, (n,) each, and the same tokens' part of every input, and
    returns one loss per token, (n,); autocast is off in it. per="sequence": it sees some whole rows of labels' first
    dimension, (n, ...), ignored tokens with what `token_stats` gives them, and returns one loss per row, such as GSPO's
    of responses or, where labels are (B, 2, T), DPO's of pairs; rows with no token that counts it never sees.
    inputs: tensors of labels' shape, or of its first dimension where losses are per sequence, with trailing dimensions
    if wanted; those that require grad get their gradient. options: as `token_stats`. reduction: "mean" over what counts
    (0 with a live graph where nothing does), "sum", or "none": a loss each, for any upstream gradient, at the price of
    4 GEMMs, which a sequence whose rows of logits do not fit into memory_budget pays in any case.
    Raises what `token_stats` raises, and GradientError where loss_fn captures a tensor that requires grad.
    Memory: a chunk's whole rows within the budget, and the gradients themselves.
    """

    def arguments() -> tuple[Tensor, ...]:
        check_loss_fn(loss_fn)
        check_loss(reduction, per, hidden)
        check_hidden(hidden, head)
        return flatten_inputs(inputs, hidden, per)

    extra = on_all(head, arguments)
    formed = reduction != "none" and per == "token"
    call = _prepared(hidden, head, labels, alike=(reduction, per), formed=formed, **options)
    sequences = tuple(hidden.shape[:-1]) if per == "sequence" else None
    if reduction == "none":
        return loss_of_each(loss_fn, call, extra, sequences).reshape(hidden.shape[: 1 if sequences else -1])
    if call.sampling_mask is not None:
        return loss_over_sets(loss_fn, call, extra, reduction == "mean", sequences)
    return chunked_loss(loss_fn, call, extra, reduction == "mean", sequences)


def linear_cross_entropy(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    labels: Tensor,  # (...)
    *,
    weight: Tensor | None = None,  # (V,)
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    denominator: float | Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """Cross-entropy of the head's logits with integer labels, loss and gradients in 3 GEMMs.

    Dense equivalent:

        z, s = softcap(scale * F.linear(hidden, head.weight, head.bias)) / temperature, label_smoothing
        w = weight[labels]  # 1 without weights, 0 where ignored
        each = F.cross_entropy(z, labels, weight, reduction="none", label_smoothing=s)
        (each + z_loss * w * z.logsumexp(-1).square()).sum() / w.sum()

    hidden: (..., H); labels: (...) integer, not shifted, `ignore_index` (-100) where a token does not count.
    weight: a constant per class; as in torch, "mean" then divides by the sum of the labels' weights (no token counts
    where that is 0), and label smoothing weighs every class by its own; the two together are refused where the head has
    a softcap or is sharded. reduction: "mean", "sum" or "none"; denominator: divides the sum in the place of the number
    of tokens that count, or of their weights (Trainer's num_items_in_batch; of a tensor the value is not looked at, and
    0 gives inf). options: temperature, ignore_index, memory_budget and backend of `token_stats`. Returns fp32 (fp64 for
    fp64 inputs). A mean over no token is 0. Probability targets are refused. Raises what `token_stats` raises.
    backend="quack": the package quack-kernels forms loss and gradients, with its exponentials in bf16; for a plain bf16
    head on Hopper, and never taken unless it is named: this project has not seen it run.
    Memory: a chunk's whole rows within the budget, and the gradients.
    Label smoothing: Szegedy et al., arXiv 1512.00567; z-loss: Chowdhery et al., arXiv 2204.02311.
    """

    on_all(head, lambda: _check_loss(hidden, head, labels, weight, reduction, label_smoothing, z_loss, options))
    divisor = on_all(head, lambda: _check_denominator(denominator, reduction, hidden))
    options["want"] = cross_entropy_wants(label_smoothing, z_loss)
    if options.get("backend") == quack_support.NAME:
        return _cross_entropy_by_quack(hidden, head, labels, reduction == "mean", divisor, options)
    alike = label_smoothing, z_loss, reduction, divisor
    given = CrossEntropyOptions(float(label_smoothing), float(z_loss), reduction == "mean", divisor)
    run = _cross_entropy_of_each if reduction == "none" else _cross_entropy
    return run(hidden, head, labels, weight, given, alike, options)


def _cross_entropy(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor,
    weight: Tensor | None,
    given: CrossEntropyOptions,
    alike: tuple[Any, ...],
    options: Options,
) -> Tensor:
    """The loss of all tokens, with its gradient formed in the forward pass."""
    if torch.compiler.is_compiling() and _breaks_graphs(head, options):
        return _uncompiled_cross_entropy(hidden, head, labels, weight, given, alike, options)
    call = _prepared(hidden, head, labels, alike=alike, weight=weight, formed=True, **options)
    run = operators.cross_entropy if torch.compiler.is_compiling() else chunked_cross_entropy
    return run(call, given)


def _cross_entropy_of_each(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor,
    weight: Tensor | None,
    given: CrossEntropyOptions,
    alike: tuple[Any, ...],
    options: Options,
) -> Tensor:
    """The loss of every token, 0 where ignored."""
    numbers = _token_stats(hidden, head, labels, alike, weight, **options)
    if weight is None:
        return cross_entropy_of(numbers, given)
    classes = weight.detach().to(numbers.logprob.dtype)
    weights = label_weights(labels, classes, options.get("ignore_index", -100))
    return cross_entropy_of(numbers, given, weights, classes)


@_uncompiled
def _cross_entropy_by_quack(
    hidden: Tensor, head: LMHead, labels: Tensor, mean: bool, denominator: Tensor | None, options: Options
) -> Tensor:
    call = on_all(head, lambda: flatten_whole_loss(hidden, head, labels, **options))
    return quack.cross_entropy(call, mean, denominator)


def _token_stats(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor | None,
    alike: tuple[Any, ...] = (),
    weight: Tensor | None = None,
    **options: Unpack[Options],
) -> TokenStats:
    """`token_stats`; alike, weight: as `_prepared` takes them."""
    if torch.compiler.is_compiling() and _breaks_graphs(head, options):
        return _uncompiled_token_stats(hidden, head, labels, alike, weight, **options)
    call = _prepared(hidden, head, labels, alike=alike, weight=weight, **options)
    found = operators.stats(call) if torch.compiler.is_compiling() else stats(call)
    lead = hidden.shape[:-1]
    return TokenStats({name: x.reshape(lead + x.shape[1:]) for name, x in found.items()})


_uncompiled_token_stats, _uncompiled_cross_entropy = _uncompiled(_token_stats), _uncompiled(_cross_entropy)


def _prepared(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor | None,
    alike: tuple[Any, ...] = (),
    weight: Tensor | None = None,
    formed: bool = False,
    **options: Unpack[Options],
) -> Call:
    """The checked call, made alike on all ranks that share the head, with the adapters' products of the hidden states.

    alike: options beside the call's that the ranks compare; weight: constants per class; formed: whether a gradient is
    formed in the forward pass.
    """
    call = on_all(head, lambda: flatten(hidden, head, labels, **options))
    if weight is not None:
        call = replace(call, inputs=call.inputs._replace(class_weights=weight.detach().to(call.compute)))
    if head.shard is not None:
        call = replace(call, alike=str([x for x in alike if not isinstance(x, Tensor)]))
        if not torch.compiler.is_compiling():  # an operator of the graph does it there
            call = agreed(call, *(x for x in alike if isinstance(x, Tensor)))
    reference = options.get("reference")
    call = with_outside(with_lora(call, reference[1] if isinstance(reference, tuple) else None))
    return by_registers(call, Needs.of(call.inputs), formed)


def _check_loss(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    options: Options,
) -> None:
    check_reduction(reduction)
    check_cross_entropy(label_smoothing, z_loss)
    _check_names(options)
    check_hidden(hidden, head)
    if not isinstance(labels, Tensor):
        raise DtypeError(f"labels: expected a tensor of integer ids, got {type(labels).__name__}")
    _check_weight(weight, head, hidden, label_smoothing)
    if options.get("backend") == quack_support.NAME:
        quack_support.check_loss(reduction, weight, label_smoothing, z_loss)


def _check_names(options: Options) -> None:
    for name in options:
        if name not in CROSS_ENTROPY_OPTIONS:
            near = difflib.get_close_matches(name, CROSS_ENTROPY_NAMES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(CROSS_ENTROPY_NAMES)}"
            raise OptionError(f"linear_cross_entropy: unknown option {name!r}; {hint}")


def _check_weight(weight: Tensor | None, head: LMHead, hidden: Tensor, smoothing: float) -> None:
    if weight is None:
        return
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        got = dtype_of(weight)
        raise DtypeError(f"weight: expected a floating tensor of one number per class, got {got}")
    if tuple(weight.shape) != (head.rows,):
        raise ShapeError(f"weight: expected one number per class, shape ({head.rows},), got {tuple(weight.shape)}")
    if weight.device != hidden.device:
        raise DeviceError(f"weight: expected it on {hidden.device}, where hidden is, got {weight.device}")
    if smoothing and (head.softcap or head.shard is not None):  # logits' weighted sum is no product with one summed row
        kind = "has a softcap" if head.softcap else "is sharded"
        raise OptionError(f"weight: expected no label_smoothing beside it where the head {kind}; leave out one of them")


def _check_denominator(denominator: float | Tensor | None, reduction: str, hidden: Tensor) -> Tensor | None:
    if denominator is None:
        return None
    if reduction != "mean":
        raise OptionError(f"denominator: it divides the sum where reduction='mean', got reduction={reduction!r}")
    return divisor_of(denominator, compute_dtype(hidden), hidden.device)
