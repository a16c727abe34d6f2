"""`install`: a transformers model whose loss is logitless, through its own head, and which is otherwise itself."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...algebra.costs import DEFAULT_BUDGET, logits_bytes
from ...errors import ConfigError, DtypeError, OptionError
from ...multi_token import multi_token_cross_entropy
from ...vocab.face import LMHead, linear_cross_entropy
from .bad_batches import Watch, check_counts
from .evaluation import Evaluation
from .lm_head import (
    SHARDED,
    STATE,
    HiddenCapture,
    adapter_configs,
    alone,
    called_again,
    capturing_hidden,
    causal_lm,
    entries_of,
    evaluating,
    forward_with,
    output_head,
    replaced,
    through_head,
)
from .masked import IGNORED, check_masked, is_masked, takes_the_mean, targets_of
from .multi_token import NAME, MultiToken, attach, attached, text_of
from .trainer import follow, give_back, is_trainer, smoother_of, take_over, trainers_of

Method = Literal["dense", "logitless"]
BENEATH = "_original_forward"  # where accelerate has the forward that its autocast is around
OTHER_REQUESTS = ("logits_to_keep", "fused_lm_head")  # calls that want logits, or TRL's own output


@dataclass
class Installed:
    """What `install` leaves in a model; copied with it."""

    method: Method | Literal["auto"]
    budget: int | None
    smoothing: float
    names: tuple[str, ...]  # of forward's parameters
    previous: Callable[..., Any] | None  # forward of the instance, where it had one
    beneath: Callable[..., Any] | None  # what that is accelerate's autocast around, where it is
    on: bool = True
    lent: bool = False  # the smoothing is that of a Trainer's label smoother
    verified: bool = False  # the model changes its logits as its LMHead says
    watch: Watch = field(default_factory=Watch)
    threshold: int | None = None  # bytes of logits up to which auto is dense; None: the budget
    masked: bool = False  # a masked language model
    mean: bool = False  # its loss is the mean over each part of a batch, whatever a Trainer counted
    empty: float | None = None  # the loss of a host's part of a batch in which no token counts; None: an error

    @classmethod
    def of(
        cls, model: Any, method: Method | Literal["auto"], budget: int | None, smoothing: float, threshold: int | None
    ) -> Installed:
        """With what is read of the model as it is now."""
        names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        previous = model.__dict__.get("forward") if _is_installed(model) else None
        found = cls(method, budget, smoothing, names, previous, model.__dict__.get(BENEATH), threshold=threshold)
        found.masked = is_masked(model)
        found.mean = found.masked and takes_the_mean(model)
        return found

    def dense(self, model: Any) -> Callable[..., Any]:
        taken_off = self.beneath is not None and BENEATH not in model.__dict__
        return (self.beneath if taken_off else self.previous) or functools.partial(type(model).forward, model)


def choose(loss: str, size: int, budget: int) -> Method:
    """dense or logitless for logits of `size` bytes: auto is dense where they fit the budget."""
    if loss == "auto":
        return "dense" if size <= budget else "logitless"
    return "dense" if loss == "dense" else "logitless"


def install(
    model: Any,
    *,
    loss: Method | Literal["auto"] = "logitless",
    memory_budget: int | None = None,
    label_smoothing: float | None = None,
    threshold: int | None = None,
    metrics: bool | None = None,
    multi_token: MultiToken | None = None,
) -> None:
    """Makes `model(..., labels=labels)` return its loss without logits, in place; `uninstall` takes it back.

    Dense equivalent: the model's own `model(..., labels=labels, num_items_in_batch=n)`; the output has logits=None.

        logitless.install(model)
        model(input_ids, labels=labels).loss.backward()

    The model runs its own forward, auxiliary losses and output class included; only its head hands the hidden states
    on and its loss function streams them. Calls without labels, with logits_to_keep, and `generate` are as before.
    With labels, `use_cache` is off unless given: a cache makes transformers forget the mask of packed documents.
    A part of a batch without a token that counts has loss 0 with a live graph. A batch without one is a LabelError,
    hidden states with NaN are a NotFiniteError (on a GPU at the next call, so that this one need not wait).
    Of a masked language model (BERT, ModernBERT, XLM-R, ...) only labelled tokens meet the head's matrix.
    model: a causal, masked or vision-language transformers model, also wrapped by PEFT, DDP, FSDP or torch.compile, or
    a transformers Trainer, whose label smoothing is then logitless too. loss: "logitless", "dense", or "auto": dense
    where the logits fit the threshold, in bytes; the budget unless given. memory_budget: bytes of slices, 256 MiB
    unless given. label_smoothing: in 0..1. metrics, of a Trainer: `evaluate` and `predict` give perplexity, accuracy
    and entropy, and `compute_metrics` gets statistics of each token, never logits; False: both gather logits as the
    Trainer does. It is so by default but where logits or texts are meant to be read: with loss="dense",
    compute_loss_func and predict_with_generate; rows without labels, or whose labels a compute_loss of one's own keeps
    from the model, are evaluated as before. multi_token: heads that predict the tokens further on; their losses are
    added, and their parameters are the model's, as `model.multi_token`, until `uninstall`. Installing again changes all
    this, and keeps them where none are given.
    Raises OptionError and ConfigError (no head, an unknown one, encoder-decoder, a loss not ForCausalLMLoss or a masked
    mean), the model then as it was.
    Memory: slices within the budget and the gradients of hidden states and head; never (N, V).
    """
    _check_options(loss, memory_budget, label_smoothing, threshold)
    measured = _has_metrics(metrics, model, loss)
    trainer, model = (model, model.model) if is_trainer(model) else (None, model)
    inner = causal_lm(model)
    _check(model, inner)
    state: Installed | None = inner.__dict__.get(STATE)
    smoothing, lent = _smoothing(label_smoothing, state, loss, trainer)
    _attach(inner, multi_token, loss, smoothing)
    if trainer is not None:
        take_over(trainer, loss, Evaluation(memory_budget, shifted=not is_masked(inner)) if measured else None)
        options = {"loss": loss, "memory_budget": memory_budget, "threshold": threshold, "multi_token": multi_token}
        follow(trainer, inner, functools.partial(install, label_smoothing=smoothing, **options))
    _put(inner, state, loss, memory_budget, smoothing, threshold).lent = lent


def _smoothing(given: float | None, state: Installed | None, loss: str, trainer: Any) -> tuple[float, bool]:
    """The label smoothing, and whether it is a Trainer's: its own, else what is given, else what it was."""
    smoother = None if loss == "dense" else smoother_of(trainer)
    if smoother is not None:
        return float(smoother.epsilon), True
    if given is not None or state is None or loss == "dense":
        return float(given or 0.0), False
    another = trainer is not None and state.lent
    return (0.0, False) if another else (state.smoothing, state.lent)


def _attach(model: Any, multi_token: MultiToken | None, loss: str, smoothing: Any) -> None:
    """Gives the model what predicts the tokens further on; what it has already stays."""
    if multi_token is None and attached(model) is None:
        return
    wrong = {"a masked language model": is_masked(model), f"loss={loss!r}": loss != "logitless"}
    got = next((name for name, is_so in (wrong | {"label smoothing": smoothing}).items() if is_so), None)
    if got:
        raise OptionError(
            f"multi_token: expected a causal model's own logitless loss, got {got}; leave out one of the two"
        )
    if multi_token is not None:
        attach(model, multi_token)


def _put(
    model: Any, state: Installed | None, loss: Any, budget: int | None, smoothing: float, threshold: int | None
) -> Installed:
    """Puts our forward into the model, or changes what the one that is there does."""
    if state is not None and _is_installed(model):
        state.method, state.budget, state.smoothing, state.on = loss, budget, smoothing, True
        state.threshold = threshold
        return state
    state = Installed.of(model, loss, budget, smoothing, threshold)
    setattr(model, STATE, state)
    model.forward = MethodType(_forward_like(type(model)), model)
    return state


def uninstall(model: Any) -> None:
    """Gives the model, and the Trainers that were installed with it, their own forward and steps back.

    Nothing happens where none was replaced.
    """
    if is_trainer(model):
        give_back(model)
        model = model.model
    inner = causal_lm(model)
    for trainer in trainers_of(inner):
        give_back(trainer)
    state: Installed | None = inner.__dict__.get(STATE)
    if state is None:
        return
    if attached(inner) is not None:
        delattr(inner, NAME)
    # enough where somebody wrapped the installed forward, as accelerate's autocast does
    state.on, state.smoothing = False, 0.0
    if getattr(inner.__dict__.get("forward"), "__func__", None) is _forward_like(type(inner)):
        del inner.forward
        if state.previous is not None:
            inner.forward = state.previous
        delattr(inner, STATE)


def hidden_states(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The final hidden states (B, T, H) of a transformers model: what its head is called with.

    Dense equivalent:

        causal_lm.base_model(**batch).last_hidden_state

    model: wrapped or not (PEFT, DDP, FSDP, DeepSpeed); all of it runs but the head, under the caller's grad mode.
    batch: the model's inputs by name; labels are left out. Raises ConfigError, DtypeError. Memory: the body's own.
    """
    if not isinstance(batch, Mapping):
        raise DtypeError(f"batch: expected the model's inputs by name in a dict, got {type(batch).__name__}")
    return forward_with(model, dict(batch), lambda _, hidden: hidden)


def _has_metrics(asked: bool | None, model: Any, loss: str) -> bool:
    """Whether an evaluation's metrics come from statistics: as asked, else where nothing of the Trainer's is lost."""
    streamed = loss != "dense" and not isinstance(model, nn.Module)
    if asked and not streamed:
        got = "loss='dense', which has logits" if loss == "dense" else type(model).__name__
        raise OptionError(f"metrics: expected a Trainer whose loss is logitless, got {got}; leave metrics out")
    if asked is not None:
        return asked
    generates = getattr(getattr(model, "args", None), "predict_with_generate", False)
    return streamed and getattr(model, "compute_loss_func", None) is None and not generates


def _check_options(
    loss: str, memory_budget: float | None, smoothing: float | None, threshold: float | None = None
) -> None:
    if loss not in ("auto", "dense", "logitless"):
        raise OptionError(f"loss: expected 'auto', 'dense' or 'logitless', got {loss!r}")
    for name, size in (("memory_budget", memory_budget), ("threshold", threshold)):
        if size is not None and not (isinstance(size, Real) and 0 < size < math.inf):
            raise OptionError(f"{name}: expected a positive number of bytes or None, got {size!r}")
    if smoothing is not None and not (isinstance(smoothing, Real) and 0 <= smoothing <= 1):
        raise OptionError(f"label_smoothing: expected a number in 0..1, got {smoothing!r}")
    if loss == "dense" and smoothing:
        raise OptionError("label_smoothing: the dense loss is the model's own and has none, use loss='logitless'")


def _check(wrapped: nn.Module, model: Any) -> None:
    """ConfigError unless the model's loss is a cross-entropy of what its one output head returns."""
    _check_prompt(wrapped)
    name = type(model).__name__
    head: Any = output_head(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder, whose loss is not shifted: use linear_cross_entropy")
    if not any(hasattr(getattr(head, "weight", None), mark) for mark in SHARDED):
        with evaluating(head):  # while it trains, each look moves the weight that spectral_norm makes
            LMHead.of(model)
    if is_masked(model):
        check_masked(model)
        return
    if not _calls_loss_function(type(model)):
        raise ConfigError(f"{name} computes its loss by itself, expected self.loss_function: use linear_cross_entropy")
    _check_loss(model)


def _check_loss(model: Any) -> None:
    """ConfigError unless its loss is transformers' cross-entropy."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        name = type(model).__name__
        own = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        raise ConfigError(f"{name}'s loss is {own}, expected transformers' ForCausalLMLoss: write it with token_loss")


def _check_prompt(model: nn.Module) -> None:
    """ConfigError where PEFT computes the loss anew, from the model's logits."""
    if any(config.peft_type == "CPT" for config in adapter_configs(model)):
        raise ConfigError("PEFT's CPT weighs a loss of its own from the logits, expected the model's: train it dense")


def _calls_loss_function(kind: type) -> bool:
    """Whether its forward does, or the one that it calls as super().forward."""
    for owner in kind.__mro__:
        if "forward" not in owner.__dict__:
            continue
        names = inspect.unwrap(owner.__dict__["forward"]).__code__.co_names
        if "loss_function" in names:
            return True
        if "super" not in names:
            return False
    return False


def _is_installed(model: Any) -> bool:
    """Not so in a model that was pickled whole: there the class's own forward takes our place."""
    forward = model.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(model).forward


@functools.cache
def _forward_like(kind: type) -> Callable[..., Any]:
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
        size = logits_bytes(labels.numel(), entries_of(model, head), dtype.itemsize)
        if choose(state.method, size, state.threshold or state.budget or DEFAULT_BUDGET) == "dense":
            return dense(**given)
    return _streamed(model, state, dense, given)


def _asks(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _streamed(model: Any, state: Installed, dense: Callable[..., Any], given: dict[str, Any]) -> Any:
    as_dict = given.pop("return_dict", None)
    as_dict = getattr(model.config, "return_dict", True) if as_dict is None else as_dict
    with alone(model), capturing_hidden(model, probed=not (state.verified or torch.compiler.is_compiling())) as seen:
        seen.of_loss = True
        full = (_masked if state.masked else _causal)(model, state, dense, given, seen)
    output = type(full)(**{name: x for name, x in full.items() if name != "logits"})
    return output if as_dict else output.to_tuple()


def _causal(model: Any, state: Installed, dense: Callable[..., Any], given: dict[str, Any], seen: HiddenCapture) -> Any:
    """The output of a model that calls its loss function."""
    if state.lent:
        return _smoothed(model, state, dense, given, seen)
    own = model.__dict__.get("_loss_function")  # set after `install`, or ours, where a hook calls the model again
    if own is not None and not isinstance(own, functools.partial):
        _check_loss(model)
    with replaced(model, "_loss_function", functools.partial(_causal_loss, model, state, seen, given)):
        return dense(**given, return_dict=True)


def _smoothed(
    model: Any, state: Installed, dense: Callable[..., Any], given: dict[str, Any], seen: HiddenCapture
) -> Any:
    """The output of a model that is not shown its labels and adds nothing to the loss: a smoother sees logits alone."""
    labels = given.pop("labels")
    full = dense(**given, return_dict=True)
    more: dict[str, Any] = {name: given.get(name) for name in ("num_items_in_batch", "shift_labels")}
    full["loss"] = _causal_loss(model, state, seen, given, full.logits, labels, **more)
    return full


def _masked(model: Any, state: Installed, dense: Callable[..., Any], given: dict[str, Any], seen: HiddenCapture) -> Any:
    """The output of a masked language model, which is not shown its labels."""
    targets, items = targets_of(model, given.pop("labels")), given.get("num_items_in_batch")
    full = dense(**given, return_dict=True)
    check_counts(targets, IGNORED, items)
    mean = state.mean and not state.smoothing  # Trainer's label smoother does divide by what it counted
    full["loss"] = _loss(model, state, seen, full.logits, targets, IGNORED, items, mean)
    return full


def _causal_loss(
    model: Any,
    state: Installed,
    seen: HiddenCapture,
    given: Mapping[str, Any],
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss of the hidden states that were captured at the head."""
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    if shift_labels is None and state.empty is None:  # shifted before: so that sequences could be cut
        check_counts(targets, ignore_index, num_items_in_batch)
    further = attached(model)
    if further is None:
        loss = _loss(model, state, seen, logits, targets, ignore_index, num_items_in_batch)
        if state.empty is None or num_items_in_batch is not None:
            return loss
        return torch.where((targets != ignore_index).any().to(loss.device), loss, state.empty)
    first, labels = (1, labels) if shift_labels is None else (0, shift_labels)
    options = {"ignore_index": ignore_index, "denominator": _denominator(num_items_in_batch)}
    return _with_further(model, state, seen, logits, further, text_of(given), labels, first, options)


def _with_further(
    model: Any,
    state: Installed,
    seen: HiddenCapture,
    logits: Tensor,
    further: MultiToken,
    text: tuple[Tensor, Tensor | None],
    labels: Tensor,
    first: int,
    options: dict[str, Any],
) -> Tensor:
    """The model's own cross-entropy and those of the depths beyond; first: how far labels lie from what it predicts."""
    own = [seen.hidden()] if further.main_weight else []
    weights = (further.main_weight,) * len(own) + further.weights

    def compute(head: LMHead, hiddens: Tensor, labels: Tensor, places: Tensor | None) -> Tensor:
        _verify(model, state, seen, head, logits)
        heads = [head] * len(own) + further.heads(head)
        at = {"first": first + 1 - len(own), "position_ids": places, "memory_budget": state.budget}
        found = multi_token_cross_entropy(hiddens, heads, labels, weights=weights, **at, **options)
        further.each = found.each
        return found.loss

    state.watch.before()
    ids, places = text
    hiddens = torch.stack([*own, *further.depths(seen.hidden(), ids, places)])
    loss = through_head(model, compute, hiddens, labels, places)
    state.watch.after(loss)
    return loss


def _loss(
    model: Any,
    state: Installed,
    seen: HiddenCapture,
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    items: Tensor | int | None,
    mean: bool = False,
) -> Tensor:
    """The cross-entropy of the captured hidden states; mean: over this part of the batch, whatever `items` says."""
    state.watch.before()
    denominator = None if mean else _denominator(items)

    def compute(head: LMHead, hidden: Tensor, targets: Tensor) -> Tensor:
        _verify(model, state, seen, head, logits)
        return linear_cross_entropy(
            hidden,
            head,
            targets,
            ignore_index=ignore_index,
            label_smoothing=state.smoothing,
            denominator=denominator,
            memory_budget=state.budget,
        )

    loss = through_head(model, compute, seen.hidden(), targets)
    state.watch.after(loss)
    return loss


def _denominator(items: Tensor | float | None) -> Tensor | float | None:
    """What divides the sum, as in the model's own loss: also 0, which the pass takes as a tensor alone."""
    return items if items is None or isinstance(items, Tensor) or items else torch.zeros(())


def _verify(model: Any, state: Installed, seen: HiddenCapture, head: LMHead, logits: Tensor) -> None:
    """Once for a model, that it changes its logits as its LMHead says."""
    if seen.probe is not None:
        check_transforms(model, head, seen.probe, logits)
        state.verified = True


def check_transforms(model: Any, head: LMHead, probe: Tensor, logits: Tensor) -> None:
    """ConfigError where the model does to its logits what its LMHead does not."""
    z = head.scale * probe[..., : head.rows]
    z = head.softcap * (z / head.softcap).tanh() if head.softcap else z
    if logits.shape != z.shape or not bool(((logits - z).abs() <= 0.01 * (1 + z.abs())).all()):
        raise ConfigError(
            f"{type(model).__name__} changes its logits otherwise than by scale {head.scale:g} and softcap "
            f"{head.softcap}: pass hidden_states and an LMHead of your own to linear_cross_entropy"
        )
