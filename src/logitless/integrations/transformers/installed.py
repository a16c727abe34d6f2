"""What `install` leaves in a model: a forward whose loss streams its hidden states, and that is otherwise its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...algebra.costs import logits_bytes
from ...errors import ConfigError, DtypeError
from ...multi_token import multi_token_cross_entropy
from ...vocab.face import LMHead, autocast_dtype, default_budget, linear_cross_entropy
from .bad_batches import Watch, check_counts, or_empty
from .lm_head import (
    STATE,
    HiddenCapture,
    alone,
    called_again,
    capturing_hidden,
    entries_of,
    observe,
    output_head,
    replaced,
    through_head,
    verify,
)
from .masked import IGNORED, is_masked, takes_the_mean, targets_of
from .multi_token import MultiToken, attached, text_of

Method = Literal["dense", "logitless"]
BENEATH = "_original_forward"  # where accelerate has the forward that its autocast is around
OTHER_REQUESTS = ("logits_to_keep", "fused_lm_head")  # calls that want logits, or TRL's own output


@dataclass
class Installed:
    """What `install` leaves in a model; copied with it."""

    names: tuple[str, ...]  # of forward's parameters
    previous: Callable[..., Any] | None  # forward of the instance, where it had one
    beneath: Callable[..., Any] | None  # what that is accelerate's autocast around, where it is
    method: Method | Literal["auto"] = "logitless"
    budget: int | None = None
    smoothing: float = 0.0
    on: bool = True
    lent: bool = False  # the smoothing is that of a Trainer's label smoother
    watch: Watch = field(default_factory=Watch)
    threshold: int | None = None  # bytes of logits up to which auto is dense; None: the budget
    masked: bool = False  # a masked language model
    mean: bool = False  # its loss is the mean over each part of a batch, whatever a Trainer counted
    empty: float | None = None  # the loss of a host's part of a batch in which no token counts; None: an error

    @classmethod
    def of(cls, model: Any) -> Installed:
        """With what is read of the model as it is now."""
        names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        previous = model.__dict__.get("forward") if is_installed(model) else None
        masked = is_masked(model)
        return cls(names, previous, model.__dict__.get(BENEATH), masked=masked, mean=masked and takes_the_mean(model))

    def dense(self, model: Any) -> Callable[..., Any]:
        taken_off = self.beneath is not None and BENEATH not in model.__dict__
        return (self.beneath if taken_off else self.previous) or functools.partial(type(model).forward, model)


def choose(loss: str, size: int, budget: int) -> Method:
    """dense or logitless for logits of `size` bytes: auto is dense where they fit the budget."""
    return "dense" if loss == "dense" or (loss == "auto" and size <= budget) else "logitless"


def is_installed(model: Any) -> bool:
    """Not so in a model that was pickled whole: there the class's own forward takes our place."""
    forward = model.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(model).forward


def is_ours(forward: Any) -> bool:
    """Whether it is what `install` puts in the place of a model's forward."""
    return hasattr(forward, STATE)


@functools.cache
def forward_like(kind: type) -> Callable[..., Any]:
    """A method with the signature of `kind.forward`, which generate and Trainer read."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = args[1:] if args and args[0] is self else args  # accelerate binds once more what autocast was around
        with called_again(self):
            return _forward(self, args, kwargs)

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    del forward.__wrapped__  # accelerate goes down this chain when it takes its autocast off
    setattr(forward, STATE, True)
    return forward


def _forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state: Installed | None = model.__dict__.get(STATE)
    if state is None:  # uninstalled, where somebody put ours back
        return type(model).forward(model, *args, **kwargs)
    dense = state.dense(model)
    given = {**dict(zip(state.names, args, strict=False)), **kwargs}
    labels = given.get("labels")
    # More arguments than names, or one given twice: the model's own error.
    fits = len(given) == len(args) + len(kwargs)
    if not state.on or labels is None or not fits or any(_asks(given.get(name)) for name in OTHER_REQUESTS):
        return dense(*args, **kwargs)
    if not isinstance(labels, Tensor):
        raise DtypeError(f"labels: expected integer ids in a tensor, got {type(labels).__name__}")
    if "use_cache" in state.names and given.get("use_cache") is None:
        given["use_cache"] = False
    if state.method != "logitless" and not state.smoothing:
        head: Any = output_head(model)
        dtype = head.weight.dtype if head.weight.is_floating_point() else model.dtype  # of 4 bits: bytes
        dtype = autocast_dtype(head.weight) or dtype
        size = logits_bytes(labels.numel(), entries_of(model, head), dtype.itemsize)
        if choose(state.method, size, state.threshold or state.budget or default_budget(head.weight.device)) == "dense":
            return dense(**given)
    return _streamed(model, state, dense, given)


def _asks(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _streamed(model: Any, state: Installed, dense: Callable[..., Any], given: dict[str, Any]) -> Any:
    as_dict = given.pop("return_dict", None)
    as_dict = getattr(model.config, "return_dict", True) if as_dict is None else as_dict
    with alone(model), capturing_hidden(model, probed=True) as seen:
        seen.of_loss = True
        call = LossCall(model, state, dense, given, seen)
        full = call.masked() if state.masked else call.causal()
    output = type(full)(**{name: x for name, x in full.items() if name != "logits"})
    return output if as_dict else output.to_tuple()


@dataclass(repr=False, eq=False)  # of a whole model, and of tensors
class LossCall:
    """One forward of a model with labels, whose loss is made of the hidden states `seen` at its head."""

    model: Any
    state: Installed
    dense: Callable[..., Any]
    given: dict[str, Any]
    seen: HiddenCapture

    def causal(self) -> Any:
        """The output of a model that calls its loss function."""
        model = self.model
        if self.state.lent:
            return self._smoothed()
        own = model.__dict__.get("_loss_function")  # set after `install`, or ours, where a hook calls the model again
        if own is not None and not isinstance(getattr(own, "__self__", None), LossCall):
            check_loss(model)
        with replaced(model, "_loss_function", self.loss_function):
            full = self.dense(**self.given, return_dict=True)
        if not self.seen.gave_loss:
            raise ConfigError(
                f"{type(model).__name__} returned a loss without a call of its loss function, expected one for labels: "
                "use linear_cross_entropy"
            )
        return full

    def _smoothed(self) -> Any:
        """The output of a model that is not shown labels and adds nothing to the loss: a smoother sees logits alone."""
        labels = self.given.pop("labels")
        full = self.dense(**self.given, return_dict=True)
        more: dict[str, Any] = {name: self.given.get(name) for name in ("num_items_in_batch", "shift_labels")}
        full["loss"] = self.loss_function(full.logits, labels, **more)
        return full

    def masked(self) -> Any:
        """The output of a masked language model, which is not shown its labels."""
        state, items = self.state, self.given.get("num_items_in_batch")
        targets = targets_of(self.model, self.given.pop("labels"))
        full = self.dense(**self.given, return_dict=True)
        check_counts(targets, IGNORED, items)
        mean = state.mean and not state.smoothing  # Trainer's label smoother does divide by what it counted
        loss = self._loss(full.logits, targets, IGNORED, items, mean)
        full["loss"] = or_empty(loss, targets, IGNORED, items, state.empty)
        return full

    def loss_function(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """transformers' ForCausalLMLoss of the hidden states that were captured at the head."""
        self.seen.gave_loss = True
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        part = shift_labels is not None  # shifted before: so that sequences could be cut
        if not part and self.state.empty is None:
            check_counts(targets, ignore_index, num_items_in_batch)
        further = attached(self.model)
        if further is None:
            loss = self._loss(logits, targets, ignore_index, num_items_in_batch)
        else:
            first, labels = (1, labels) if shift_labels is None else (0, shift_labels)
            options = {"ignore_index": ignore_index, "denominator": _denominator(num_items_in_batch)}
            loss = self._with_further(logits, further, targets, labels, first, options)
        return loss if part else or_empty(loss, targets, ignore_index, num_items_in_batch, self.state.empty)

    def _with_further(
        self, logits: Tensor, further: MultiToken, targets: Tensor, labels: Tensor, first: int, options: dict[str, Any]
    ) -> Tensor:
        """The model's cross-entropy and those of the depths beyond; first: how far labels lie from what it predicts."""
        own = [self.seen.hidden()] if further.main_weight else []
        weights = (further.main_weight,) * len(own) + further.weights

        def compute(
            head: LMHead, hiddens: Tensor, labels: Tensor, places: Tensor | None, hidden: Tensor, targets: Tensor
        ) -> Tensor:
            verify(self.model, head, self.seen.probe, logits)
            observe(self.model, head, hidden, targets)
            heads = [head] * len(own) + further.heads(head)
            at = {"first": first + 1 - len(own), "position_ids": places, "memory_budget": self.state.budget}
            found = multi_token_cross_entropy(hiddens, heads, labels, weights=weights, **at, **options)
            further.each = found.each
            return found.loss

        ids, places = text_of(self.given)
        self.state.watch.before()
        hiddens = torch.stack([*own, *further.depths(self.seen.hidden(), ids, places)])
        loss = through_head(self.model, compute, hiddens, labels, places, self.seen.hidden(), targets)
        self.state.watch.after(loss)
        return loss

    def _loss(
        self, logits: Tensor, targets: Tensor, ignore_index: int, items: Tensor | int | None, mean: bool = False
    ) -> Tensor:
        """The cross-entropy of the captured hidden states; mean: over this part of the batch, whatever `items` says."""
        self.state.watch.before()
        denominator = None if mean else _denominator(items)

        def compute(head: LMHead, hidden: Tensor, targets: Tensor) -> Tensor:
            verify(self.model, head, self.seen.probe, logits)
            observe(self.model, head, hidden, targets)
            return linear_cross_entropy(
                hidden,
                head,
                targets,
                ignore_index=ignore_index,
                label_smoothing=self.state.smoothing,
                denominator=denominator,
                memory_budget=self.state.budget,
            )

        loss = through_head(self.model, compute, self.seen.hidden(), targets)
        self.state.watch.after(loss)
        return loss


def check_loss(model: Any) -> None:
    """ConfigError unless its loss is transformers' cross-entropy."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss = model.loss_function
    if loss is not ForCausalLMLoss:
        name, of = type(model).__name__, getattr(loss, "func", loss)  # what a partial is of
        own = getattr(of, "__name__", type(of).__name__)
        own = own if of is loss else f"a partial of {own}"
        raise ConfigError(f"{name}'s loss is {own}, expected transformers' ForCausalLMLoss: write it with token_loss")


def _denominator(items: Tensor | float | None) -> Tensor | float | None:
    """What divides the sum, as in the model's own loss: also 0, which the pass takes as a tensor alone."""
    return items if items is None or isinstance(items, Tensor) or items else torch.zeros(())
