"""Masked language models: labels are not shifted and few, and most models compute their loss by themselves."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from ...errors import ConfigError

IGNORED = -100
OWN_CRITERIA = ("CrossEntropyLoss", "mlm_loss_fct")  # what a forward names that takes the mean over labels itself


def is_masked(model: Any) -> bool:
    """Whether the model is one of transformers' masked language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    known = {name for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() if name.endswith("ForMaskedLM")}
    return any(kind.__name__ in known and kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def check_masked(model: Any) -> None:
    """ConfigError unless the model's loss is the cross-entropy of labelled tokens, by itself or by transformers'."""
    from transformers.loss.loss_utils import ForMaskedLMLoss

    if not takes_the_mean(model) and model.loss_function is not ForMaskedLMLoss:
        own = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        name = type(model).__name__
        raise ConfigError(f"{name}'s loss is {own}, expected transformers' ForMaskedLMLoss: write it with token_loss")


def takes_the_mean(model: Any) -> bool:
    """Whether the model's forward takes the mean over its labelled tokens, whatever a Trainer counted."""
    names = inspect.unwrap(type(model).forward).__code__.co_names
    return any(criterion in names for criterion in OWN_CRITERIA)


def targets_of(model: Any, labels: Tensor) -> Tensor:
    """The labels as the model's loss sees them: ModernBERT may leave out those of another number first."""
    if not getattr(model, "sparse_prediction", False):
        return labels
    return labels.masked_fill(labels == model.sparse_pred_ignore_index, IGNORED)
