"""What `install` puts into a transformers Trainer, and takes out again: evaluation, label smoothing, model_init."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from ...errors import ConfigError, OptionError
from .evaluation import Evaluation
from .lm_head import STATE, causal_lm, replaced
from .multi_token import attached

KEPT = "_logitless"


class Replaced(NamedTuple):
    """A method of ours, and the instance's own that was there, where it had one."""

    ours: Callable[..., Any]
    own: Callable[..., Any] | None


@dataclass
class Kept:
    """What `install` keeps of a Trainer: what it replaced there."""

    put: dict[str, Replaced] = field(default_factory=dict)  # methods that we put into the instance, by name
    smoother: Any = None  # the label smoother, which asks the model for logits rather than for a loss
    evaluation: Evaluation | None = None  # where its metrics come from statistics
    install: Callable[[Any], None] | None = None  # for the models that model_init makes
    multi_token: bool = False  # the model has heads that predict the tokens further on


# of each installed model, the Trainers that were installed with it
_TRAINERS: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()


def trainers_of(model: Any) -> list[Any]:
    """Those whose model it still is."""
    return [x for x in _TRAINERS.get(model, ()) if KEPT in x.__dict__ and causal_lm(x.model) is model]


def _put_into(trainer: Any, name: str, value: Callable[..., Any]) -> None:
    """Gives the instance a method; `_take_out` takes it away."""
    kept: Kept = trainer.__dict__[KEPT]
    kept.put[name] = Replaced(value, trainer.__dict__.get(name))
    trainer.__dict__[name] = value


def _take_out(trainer: Any, kept: Kept, name: str) -> None:
    """Puts back what was there, unless somebody has wrapped ours: theirs stays, and ours does nothing of its own."""
    put = kept.put.pop(name, None)
    if put is not None and trainer.__dict__.get(name) is put.ours:
        del trainer.__dict__[name]
        if put.own is not None:
            trainer.__dict__[name] = put.own


def follow(trainer: Any, model: Any, install: Callable[[Any], None]) -> None:
    """`train` makes a new model where the Trainer has a model_init: which is installed as this one was."""
    _TRAINERS.setdefault(model, WeakSet()).add(trainer)
    kept: Kept = trainer.__dict__[KEPT]
    kept.install, kept.multi_token = install, attached(model) is not None
    if getattr(trainer, "model_init", None) is None or "call_model_init" in kept.put:
        return
    own = trainer.call_model_init

    def call_model_init(*given: Any, **more: Any) -> Any:
        model = own(*given, **more)
        if kept.install is not None:
            inner = causal_lm(model)
            if kept.multi_token and attached(inner) is None:
                raise OptionError(
                    "multi_token: expected model_init to make its model with modules of its own, got one without; "
                    "call install(model, multi_token=...) in it"
                )
            kept.install(model)
            inner.__dict__[STATE].lent = kept.smoother is not None
            _TRAINERS.setdefault(inner, WeakSet()).add(trainer)
        return model

    _put_into(trainer, "call_model_init", call_model_init)


def check_kernels(arguments: Any) -> None:
    """ConfigError where `train` may have Liger put a forward of its own into the model, over the installed one."""
    if not getattr(arguments, "use_liger_kernel", False):
        return
    if (arguments.liger_kernel_config or {}).get("fused_linear_cross_entropy", True):
        raise ConfigError(
            "use_liger_kernel: expected kernels of layers alone, got Liger's loss too, whose forward would replace "
            "ours where Liger has one for this model; set liger_kernel_config={'fused_linear_cross_entropy': False}"
        )


def smoother_of(trainer: Any) -> Any:
    """The label smoother of a Trainer, also where it is in our hands."""
    kept: Kept | None = None if trainer is None else trainer.__dict__.get(KEPT)
    return getattr(trainer, "label_smoother", None) or (kept and kept.smoother)


def take_over(trainer: Any, loss: str, evaluation: Evaluation | None) -> None:
    """Puts a Trainer's evaluation in our hands, and its label smoother unless the loss is dense."""
    kept: Kept | None = trainer.__dict__.get(KEPT)
    if kept is None:
        kept = trainer.__dict__[KEPT] = Kept()
        _put_into(trainer, "prediction_step", MethodType(_prediction_step, trainer))
    _measure(trainer, evaluation)
    if loss == "dense":
        trainer.label_smoother, kept.smoother = kept.smoother or trainer.label_smoother, None
    elif trainer.label_smoother is not None:
        kept.smoother, trainer.label_smoother = trainer.label_smoother, None


def _measure(trainer: Any, evaluation: Evaluation | None) -> None:
    """Puts the metrics of an evaluation in, or takes them out."""
    kept: Kept = trainer.__dict__[KEPT]
    if kept.evaluation is not None:
        _take_out(trainer, kept, "evaluation_loop")
    kept.evaluation = evaluation
    if evaluation is not None:
        _put_into(trainer, "evaluation_loop", functools.partial(evaluation.loop, trainer.evaluation_loop))


def give_back(trainer: Any) -> None:
    """Takes out of a Trainer what we put in; nothing where that is gone."""
    if KEPT not in trainer.__dict__:
        return
    _measure(trainer, None)
    kept: Kept = trainer.__dict__.pop(KEPT)
    trainer.label_smoother, kept.install = kept.smoother or trainer.label_smoother, None
    _take_out(trainer, kept, "prediction_step")
    _take_out(trainer, kept, "call_model_init")


def _prediction_step(
    trainer: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
) -> Any:
    """The Trainer's own step; where it is asked for logits, of the model as it is without us."""
    kept: Kept = trainer.__dict__.get(KEPT) or Kept()  # gone, where somebody wrapped ours
    put = kept.put.get("prediction_step")
    step = (put and put.own) or functools.partial(type(trainer).prediction_step, trainer)
    state = causal_lm(trainer.model).__dict__.get(STATE)
    if kept.evaluation is not None and state is not None:
        with replaced(state, "method", "logitless"):
            return kept.evaluation.step(
                trainer, lambda alone: step(model, inputs, alone, ignore_keys), inputs, prediction_loss_only
            )
    if prediction_loss_only or state is None:
        return step(model, inputs, prediction_loss_only, ignore_keys)
    smoother = kept.smoother or trainer.label_smoother
    with replaced(state, "on", False), replaced(trainer, "label_smoother", smoother):
        return step(model, inputs, prediction_loss_only, ignore_keys)


def is_trainer(model: Any) -> bool:
    """Whether `install` was given a Trainer in the place of a model. Raises ConfigError for TRL's."""
    if isinstance(model, nn.Module) or not (hasattr(model, "compute_loss") and hasattr(model, "model")):
        return False
    if any(kind.__module__.partition(".")[0] == "trl" for kind in type(model).__mro__):
        raise ConfigError(
            f"expected a transformers model or Trainer, got TRL's {type(model).__name__}: "
            "use logitless.integrations.trl.install(trainer)"
        )
    return True
