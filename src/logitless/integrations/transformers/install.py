"""`install`: a transformers model whose loss is logitless, through its own head, and which is otherwise itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from numbers import Real
from types import MethodType
from typing import Any, Literal

from torch import Tensor, nn

from ...algebra.options import check_bytes
from ...errors import ConfigError, OptionError
from ...vocab.face import LMHead, encodes
from .. import seam
from .evaluation import Evaluation
from .inputs import check_by_name
from .installed import Installed, Method, check_loss, forward_like, is_installed
from .lm_head import SHARDED, STATE, VERIFIED, adapter_configs, causal_lm, evaluating, forward_with, output_head
from .masked import check_masked, is_masked
from .multi_token import NAME, MultiToken, attach, attached
from .trainer import check_kernels, follow, give_back, is_trainer, smoother_of, take_over, trainers_of


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
    without gradients NaN; hidden states with NaN are a NotFiniteError (on a GPU at the next call, without a wait).
    Of a masked language model (BERT, ModernBERT, XLM-R, ...) only labelled tokens meet the head's matrix.
    model: a causal, masked or vision-language transformers model, also wrapped by PEFT, DDP, FSDP or torch.compile, or
    a transformers Trainer, whose label smoothing is then logitless too. TRL's have integrations.trl.install. loss:
    "logitless", "dense", or "auto": dense where the logits fit the threshold, in bytes; the budget unless given.
    memory_budget: bytes of slices, 256 MiB unless given, up to 1 GiB on a GPU. label_smoothing: in 0..1. metrics, of a
    Trainer: `evaluate` and `predict` give perplexity, accuracy and entropy, and `compute_metrics` gets statistics of
    each token, never logits; False: both gather logits as the Trainer does. It is so by default but where logits or
    texts are meant to be read: with loss="dense", compute_loss_func and predict_with_generate; rows without labels, or
    whose labels a compute_loss of one's own keeps from the model, are evaluated as before. multi_token: heads that
    predict the tokens further on; their losses are added, and their parameters are the model's, as `model.multi_token`,
    until `uninstall`. Installing again changes all this, and keeps them where none are given.
    Raises OptionError and ConfigError (no head, an unknown one, encoder-decoder, a loss not ForCausalLMLoss or a masked
    mean), the model then as it was.
    Memory: slices within the budget and the gradients of hidden states and head; never (N, V).
    """
    _check_options(loss, memory_budget, label_smoothing, threshold)
    measured = _has_metrics(metrics, model, loss)
    trainer, model = (model, model.model) if is_trainer(model) else (None, model)
    inner = causal_lm(model)
    _check(model, inner, trainer if loss != "dense" else None)
    state: Installed | None = inner.__dict__.get(STATE)
    smoothing, lent = _smoothing(label_smoothing, state, loss, trainer)
    _attach(inner, multi_token, loss, smoothing)
    if trainer is not None:
        take_over(trainer, loss, Evaluation(memory_budget, shifted=not is_masked(inner)) if measured else None)
        options = {"loss": loss, "memory_budget": memory_budget, "threshold": threshold}
        follow(trainer, inner, functools.partial(install, label_smoothing=smoothing, **options))
    _put(inner, state, loss, memory_budget, smoothing, threshold).lent = lent


def _smoothing(given: float | None, state: Installed | None, loss: str, trainer: Any) -> tuple[float, bool]:
    """The label smoothing, and whether it is a Trainer's: its own, else what is given, else what it was."""
    smoother = None if loss == "dense" else smoother_of(trainer)
    if smoother is not None:
        if given not in (None, smoother.epsilon):
            raise OptionError(
                f"label_smoothing: expected the Trainer's own, {smoother.epsilon}, got {given}; leave it to "
                "label_smoothing_factor"
            )
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
    """Puts our forward into the model, unless it is there, and says what it does."""
    if state is None or not is_installed(model):
        state = Installed.of(model)
        VERIFIED.pop(model, None)  # it may have changed since
        setattr(model, STATE, state)
        model.forward = MethodType(forward_like(type(model)), model)
    state.method, state.budget, state.smoothing, state.on = loss, budget, smoothing, True
    state.threshold = threshold
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
    if getattr(inner.__dict__.get("forward"), "__func__", None) is forward_like(type(inner)):
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
    check_by_name("batch", batch)
    return forward_with(model, dict(batch), lambda _, hidden: hidden, probed=False)


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


def _check_options(loss: str, memory_budget: float | None, smoothing: float | None, threshold: float | None) -> None:
    if loss not in ("auto", "dense", "logitless"):
        raise OptionError(f"loss: expected 'auto', 'dense' or 'logitless', got {loss!r}")
    check_bytes("memory_budget", memory_budget)
    check_bytes("threshold", threshold)
    if smoothing is not None and not (isinstance(smoothing, Real) and 0 <= smoothing <= 1):
        raise OptionError(f"label_smoothing: expected a number in 0..1, got {smoothing!r}")
    if loss == "dense" and smoothing:
        raise OptionError("label_smoothing: the dense loss is the model's own and has none, use loss='logitless'")


def _check(wrapped: nn.Module, model: Any, trainer: Any) -> None:
    """ConfigError unless the model's loss is a cross-entropy of what its one output head returns, and stays so."""
    _check_prompt(wrapped)
    name = type(model).__name__
    head: Any = output_head(model)
    if encodes(model.config):
        raise ConfigError(f"{name} is an encoder-decoder, whose loss is not shifted: use linear_cross_entropy")
    if not any(hasattr(getattr(head, "weight", None), mark) for mark in SHARDED):
        with evaluating(head):  # while it trains, each look moves the weight that spectral_norm makes
            LMHead.of(model)
    if is_masked(model):
        check_masked(model)
        return
    if trainer is not None:
        check_kernels(trainer.args)
    if not _calls_loss_function(type(model)):
        raise ConfigError(f"{name} computes its loss by itself, expected self.loss_function: use linear_cross_entropy")
    check_loss(model)
    if getattr(model, "z_loss_coefficient", 0):  # Bamba's, of logits that are not there
        raise ConfigError(
            f"{name} adds a z-loss of its logits, expected a cross-entropy alone: set model.z_loss_coefficient = 0, or "
            "use linear_cross_entropy(z_loss=...)"
        )


def _check_prompt(model: nn.Module) -> None:
    """ConfigError where PEFT computes the loss anew, from the model's logits."""
    if any(config.peft_type == "CPT" for config in adapter_configs(model)):
        raise ConfigError("PEFT's CPT weighs a loss of its own from the logits, expected the model's: train it dense")


def _calls_loss_function(kind: type) -> bool:
    """Whether its forward does, or the one that it calls as super().forward."""
    return any("loss_function" in seam.names_in(method) for method in seam.methods_called(kind, "forward"))
