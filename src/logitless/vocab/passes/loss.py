"""`token_loss` and cross-entropy: a chunk's loss is known with its numbers, so its gradient is formed at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...algebra.stats import has_gradient
from ...errors import DtypeError, GradientError, ShapeError
from ...losses import supervised
from ...units import plural
from ..call.call import Call, Needs, computing_all
from ..devices import full_precision
from ..stats import TokenStats
from .autograd import FormedLoss, attach, formed_again, stats
from .engine import LossPass, Together, loss_gradients
from .price import stats_price
from .seen import Seen, seen_of

LossFn = Callable[..., Tensor]


def chunked_loss(
    loss_fn: LossFn, call: Call, extra: tuple[Tensor, ...], mean: bool, sequences: tuple[int, ...] | None = None
) -> Tensor:
    """Σ over tokens of loss_fn(stats, *extra), or its mean over the valid ones; sequences: as `seen_of` takes them."""
    call, valid = computing_all(call)
    needs = Needs.of(call.inputs)

    def begin(call: Call) -> tuple[LossPass, _Caller]:
        seen = seen_of(call, sequences)
        scale = reduction_scale(call, mean, None, valid, seen.losses(seen.every))
        together = None if seen.together is None else Together(seen.together, stats_price(call, needs))
        return _begun(call, needs, together), _Caller(loss_fn, seen, extra, needs, scale)

    loss, caller = call.checked_while(begin)
    return _finish(loss, caller, call.inputs.labels)


@dataclass(frozen=True)
class CrossEntropyOptions:
    """What `linear_cross_entropy` adds to a call."""

    smoothing: float
    z_loss: float
    mean: bool  # or the sum
    denominator: Tensor | None = None  # (), in the place of the number of tokens, or of the sum of their weights


def chunked_cross_entropy(call: Call, given: CrossEntropyOptions) -> Tensor:
    """Cross-entropy over all tokens, with its gradient in closed form."""
    call, valid = computing_all(call)
    needs = Needs.of(call.inputs)

    def begin(call: Call) -> tuple[LossPass, CrossEntropy]:
        return _begun(call, needs), CrossEntropy(call, given, valid)

    loss, evaluate = call.checked_while(begin)
    return _finish(loss, evaluate, call.inputs.labels)


@torch.no_grad()
def _begun(call: Call, needs: Needs, together: Together | None = None) -> LossPass:
    with full_precision(call.inputs.hidden.device.type):
        loss = LossPass(call, needs, together, rounds=True)
        loss.run.begin()
        return loss


def loss_of_each(
    loss_fn: LossFn, call: Call, extra: tuple[Tensor, ...], sequences: tuple[int, ...] | None = None
) -> Tensor:
    """loss_fn's value for every token or sequence, 0 where ignored; loss_fn sees only what counts."""
    numbers = stats(call)
    call, valid = computing_all(call)
    call = call.valid_alone()
    seen = seen_of(call, sequences)
    loss = _loss_at_once(loss_fn, seen, numbers, extra)
    return seen.spread(loss) if valid is None else torch.where(valid, loss, 0)


def loss_over_sets(
    loss_fn: LossFn, call: Call, extra: tuple[Tensor, ...], mean: bool, sequences: tuple[int, ...] | None = None
) -> Tensor:
    """`chunked_loss` over sampling masks: numbers of all tokens at once cost no product, nor do their gradients."""
    numbers, call = stats(call), call.valid_alone()
    seen = seen_of(call, sequences)
    total = _loss_at_once(loss_fn, seen, numbers, extra).sum()
    return total * reduction_scale(call, mean, None, losses=seen.losses(seen.every))


def _loss_at_once(loss_fn: LossFn, seen: Seen, numbers: dict[str, Tensor], extra: tuple[Tensor, ...]) -> Tensor:
    """loss_fn's value for all that counts."""
    call, every = seen.call, seen.every
    shown = TokenStats({name: seen.numbers(name, call.rows(x, every), every) for name, x in numbers.items()})
    with full_precision(call.inputs.hidden.device.type):  # as where a chunk's loss is formed in the pass
        return _evaluated(loss_fn, shown, [x[seen.units(every)].clone() for x in extra], seen.losses(every), seen.unit)


def _finish(loss: LossPass, evaluate: CrossEntropy | _Caller, labels: Tensor | None) -> Tensor:
    """The loss with its graph; labels: the caller's own, which a second backward wants as they were."""
    call, needs = loss.call, loss.needs
    with torch.no_grad():
        total, stat_grads = loss_gradients(loss, evaluate)
        formed = FormedLoss(call, total, partial(formed_again, needs, stat_grads, loss.together))
    if not (needs.any or any(g is not None for g in evaluate.extra_grads)):
        return evaluate.total
    inputs = call.inputs._replace(labels=labels)
    return attach(formed, evaluate.total, inputs, evaluate.extra, evaluate.extra_grads)


def reduction_scale(
    call: Call, mean: bool, denominator: Tensor | None, valid: Tensor | None = None, losses: int | None = None
) -> Tensor:
    """What the sum over tokens is multiplied by, a scalar; (N,), 0 where ignored, where `valid` says which are not.

    losses: how many are averaged, where they are not the valid tokens'.
    """
    like = {"dtype": call.compute, "device": call.inputs.hidden.device}
    ones = torch.ones((), **like) if valid is None else valid.to(call.compute)
    if not mean:
        return ones
    if denominator is not None:
        return ones / denominator.detach().to(**like)
    if valid is not None:
        return ones / ones.sum().clamp(min=1)
    return torch.full((), 1 / max(call.n_tokens if losses is None else losses, 1), **like)


def _part(scale: Tensor, which: slice | Tensor) -> Tensor:
    """`reduction_scale` of some tokens."""
    return scale[which] if scale.dim() else scale


def cross_entropy_of(
    stats: TokenStats,
    given: CrossEntropyOptions,
    weights: Tensor | None = None,
    class_weights: Tensor | None = None,
) -> Tensor:
    """The per-token loss of `linear_cross_entropy`; weights: the labels' own of the class weights."""
    logprob = stats.logprob if weights is None else weights * stats.logprob
    loss = supervised.nll(logprob)
    if given.smoothing:
        lse = stats.logsumexp if class_weights is None else class_weights.mean() * stats.logsumexp
        loss = supervised.label_smoothing(logprob, lse, stats.mean_logit, given.smoothing)
    if given.z_loss:
        penalty = supervised.z_loss(stats.logsumexp, given.z_loss)
        loss = loss + (penalty if weights is None else weights * penalty)
    return loss


def label_weights(labels: Tensor, class_weights: Tensor, ignore_index: int) -> Tensor:
    """The labels' class weights, 0 where ignored; labels that do not exist are the pass's to refuse."""
    labels = labels.long()  # in which no ignore_index wraps around
    found = class_weights.detach().take(labels.clamp(0, class_weights.shape[0] - 1))
    return torch.where(labels == ignore_index, 0, found)


class CrossEntropy:
    """Evaluates cross-entropy and its gradient; closed form, since inside a custom operator autograd is off."""

    extra = extra_grads = ()  # inputs of the caller's own, of which there are none

    def __init__(self, call: Call, given: CrossEntropyOptions, valid: Tensor | None) -> None:
        """`call` is checked; `valid` as `reduction_scale` takes it."""
        self.call, self.given, self.class_weights = call, given, call.inputs.class_weights
        self.weights: Tensor | None = None  # the labels' own
        self.scale = reduction_scale(call, given.mean, given.denominator, valid)
        labels = call.inputs.labels
        if labels is not None and self.class_weights is not None:
            weights = label_weights(labels, self.class_weights, call.options.ignore_index)
            self.weights = weights if valid is None else torch.where(valid, weights, 0)
            if given.mean and given.denominator is None:  # no token counts where no label weighs anything
                total = self.weights.sum()
                self.scale = torch.where(total == 0, 0, reduction_scale(call, True, total, valid))
        self.total = self.scale.new_zeros(())

    def __call__(self, rows: slice, stats: dict[str, Tensor]) -> dict[str, Tensor]:
        seen, smoothing, z_loss = TokenStats(stats), self.given.smoothing, self.given.z_loss
        scale = _part(self.scale, self.call.tokens(rows)).expand_as(seen.logprob)
        weights = None if self.weights is None else self.call.rows(self.weights, rows)
        loss = cross_entropy_of(seen, self.given, weights, self.class_weights)
        self.total += (loss * scale).sum()
        own = scale if weights is None else weights * scale
        grads = {"logprob": (smoothing - 1) * own}
        if smoothing or z_loss:
            spread = scale if self.class_weights is None else self.class_weights.mean() * scale
            grads["logsumexp"] = smoothing * spread + 2 * z_loss * seen.logsumexp * own
        if smoothing:
            grads["mean_logit"] = -smoothing * scale
        return grads


class _Caller:
    """Evaluates the caller's loss function on a chunk and differentiates it with respect to the chunk's numbers."""

    def __init__(self, loss_fn: LossFn, seen: Seen, extra: tuple[Tensor, ...], needs: Needs, scale: Tensor) -> None:
        self.loss_fn, self.seen, self.extra, self.needs, self.scale = loss_fn, seen, extra, needs, scale
        self.differentiate = torch.is_grad_enabled()
        # in the compute dtype: fp16 would underflow before the loss scale arrives
        self.extra_grads: list[Tensor | None] = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, scale.dtype))
            if self.differentiate and x.requires_grad
            else None
            for x in extra
        ]
        self.total = scale.new_zeros(())

    def __call__(self, rows: slice, stats: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.set_grad_enabled(self.differentiate):
            # copies: what the caller does in place reaches neither the gradient nor the inputs
            leaves = {
                name: x.detach().clone().requires_grad_(self.needs.any and x.is_floating_point() and has_gradient(name))
                for name, x in stats.items()
            }
            parts, units = [], self.seen.units(rows)
            for x, full in zip(self.extra, self.extra_grads, strict=True):
                part = x.detach()[units].clone()
                parts.append(part if full is None else part.to(full.dtype).requires_grad_())
            shown = {name: self.seen.numbers(name, x, rows) for name, x in leaves.items()}
            loss = _evaluated(self.loss_fn, TokenStats(shown), parts, self.seen.losses(rows), self.seen.unit)
            summed = (loss.to(self.scale.dtype) * _part(self.scale, units)).sum()
        self.total += summed.detach()
        if not summed.requires_grad:
            return {}
        named = {name: x for name, x in leaves.items() if x.requires_grad}
        targets = [*named.values(), *(x for x in parts if x.requires_grad)]
        _check_leaves(summed, targets)
        found = list(torch.autograd.grad(summed, targets, allow_unused=True))
        wanted = [full for full in self.extra_grads if full is not None]
        for full, g in zip(wanted, found[len(named) :], strict=True):
            if g is not None:
                full[units] = g.to(full.dtype)
        return {name: g for name, g in zip(named, found, strict=False) if g is not None}


def _evaluated(loss_fn: LossFn, stats: TokenStats, parts: list[Tensor], n: int, unit: str) -> Tensor:
    """The caller's losses of `n` tokens or sequences; an error in them has a note on what they were made from."""
    try:
        loss = loss_fn(stats, *parts)
    except Exception as error:
        error.add_note(
            f"token_loss calls loss_fn(stats, *inputs) with the statistics of {plural(n, unit)} and "
            f"{plural(len(parts), 'input')}: read stats.logprob and so on, and pass through inputs= whatever has a "
            f"number for each {unit}"
        )
        raise
    _check_loss(loss, n, unit)
    return loss


def _check_loss(loss: object, n: int, unit: str) -> None:
    if not isinstance(loss, Tensor) or tuple(loss.shape) != (n,):
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ShapeError(
            f"loss_fn: expected one loss per {unit}, shape ({n},), got {got}; do not reduce inside loss_fn"
        )
    if loss.is_complex():
        raise DtypeError(f"loss_fn: expected a real loss per {unit}, got {loss.dtype}; take its .real")


def _check_leaves(loss: Tensor, known: list[Tensor]) -> None:
    """Raise where the loss depends on a tensor that requires grad but is no input: its gradient would be lost."""
    mine = {id(x) for x in known}
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in mine:
            raise GradientError(
                f"loss_fn: expected only its arguments to require grad, got a captured tensor of shape "
                f"{tuple(leaf.shape)} whose gradient would be lost; pass it in inputs=(...) or detach it"
            )
        stack.extend(parent for parent, _ in node.next_functions)
