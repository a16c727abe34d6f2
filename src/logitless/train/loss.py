"""The loss inside the model: what `model(input_ids, labels=...)` returns, without its logits."""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from ..algebra.costs import logits_bytes
from ..vocab.api import linear_cross_entropy
from ..vocab.head import LMHead
from .packing import IGNORED

Method = Literal["dense", "chunked"]


def choose(loss: str, size: int, budget: int) -> Method:
    """dense or chunked for logits of `size` bytes: auto is dense where they fit the budget."""
    if loss == "auto":
        return "dense" if size <= budget else "chunked"
    return "dense" if loss == "dense" else "chunked"


def hook(model: Any, loss: str, budget: int) -> None:
    """Replaces a causal LM's `forward` where labels are given, in place; without labels the model's own runs.

    Dense equivalent: `model(input_ids, labels=labels, num_items_in_batch=n).loss`. The output has no logits.
    Inside forward, rather than behind it, the loss works wherever the model does: wrapped by DDP or PEFT, under
    gradient checkpointing and accumulation, in Trainer's evaluation, autocast and compile.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    dense = inner.forward

    @functools.wraps(dense)
    def forward(input_ids: Tensor | None = None, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None or input_ids is None:
            return dense(input_ids, *args, labels=labels, **kwargs)
        kwargs.setdefault("use_cache", False)  # a cache makes transformers forget the packed mask
        head = inner.get_output_embeddings().weight
        if choose(loss, logits_bytes(input_ids.numel(), head.shape[0], head.itemsize), budget) == "dense":
            return dense(input_ids, *args, labels=labels, **kwargs)
        return _streamed(inner, budget, labels, input_ids, *args, **kwargs)

    inner.forward = forward


def _streamed(
    model: Any, budget: int, labels: Tensor, *args: Any, num_items_in_batch: Any = None, **kwargs: Any
) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    # Both looked up on every call: wrappers replace them.
    hidden = model.base_model(*args, **kwargs).last_hidden_state
    targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    loss = linear_cross_entropy(hidden, LMHead.of(model), targets, denominator=num_items_in_batch, memory_budget=budget)
    return CausalLMOutputWithPast(loss=loss)
