"""SPLADE models of sentence-transformers whose logits are pooled without being made.

    from logitless.integrations.sentence_transformers import install
    install(model)  # a SparseEncoder; then train and encode as before

Works with sentence-transformers 6.2: the two modules, `Transformer` with "fill-mask" and `SpladePooling`, stay what
they are, in memory and on disk; together they compute as one.
"""

# ruff: noqa: E402 - the seam is looked at before what it names is imported
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from types import MethodType
from typing import Any

from torch import Tensor, nn

from ..algebra.options import check_bytes
from ..errors import ConfigError
from ..retrieval import max_pool_logits, splade_activation
from ..vocab.face import LMHead
from .seam import Seam
from .transformers.lm_head import captured, causal_lm, replaced, through_head

HOST = Seam(
    "sentence-transformers",
    ">=6.2,<7",
    {
        "sentence_transformers.base.modules.transformer:Transformer.forward": ("self", "features", "kwargs"),
        "sentence_transformers.sparse_encoder.modules.splade_pooling:SpladePooling.forward": ("self", "features"),
        "sentence_transformers.sparse_encoder.model:SparseEncoder": (),
    },
)
HOST.require()

from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sparse_encoder.modules.splade_pooling import SpladePooling

BUDGET = "_logitless_budget"  # what `install` leaves in a Transformer module
LOGITS, EMBEDDING, FLAT = "token_embeddings", "sentence_embedding", "cu_seq_lens_q"  # the host's names of features
LOGS = {"relu": 1, "log1p_relu": 2}


def install(model: nn.Module, *, memory_budget: int | None = None) -> None:
    """Makes a SparseEncoder's embeddings without the logits of its tokens, in place; `uninstall` takes it back.

    Dense equivalent: the model's own, `SpladePooling(pooling_strategy="max")(transformer(features))`.

    Training, evaluation and `encode` are sentence-transformers' own, with any of its losses; so is what it saves, which
    anyone loads without logitless. Every `Transformer` with a `SpladePooling` after it is taken, also in a `Router`.
    `token_embeddings` then is the maximum over tokens, (documents, vocabulary), and not logits. Embeddings are in the
    dtype of the head's weight. memory_budget: bytes of slices, 256 MiB unless given, up to 1 GiB on a GPU.
    Raises ConfigError (no such pair, pooling_strategy="sum", which needs all logits' gradients, a backend that is not
    torch, a head that is more than a matrix, its bias and adapters) and OptionError; then the model is as it was.
    Price: one product, and backward the rows of active (document, entry) pairs. Memory: as `max_pool_logits`.
    """
    check_bytes("memory_budget", memory_budget)
    pairs = list(_pairs(model))
    if not pairs:
        raise ConfigError(
            f"expected a SparseEncoder whose Transformer is followed by SpladePooling, got {type(model).__name__} "
            "without such a pair"
        )
    for transformer, pooling in pairs:
        _check(transformer, pooling)
    for transformer, pooling in pairs:
        transformer.__dict__[BUDGET] = memory_budget
        transformer.forward = MethodType(_pooled, transformer)
        pooling.forward = MethodType(_activated, pooling)


def uninstall(model: nn.Module) -> None:
    """Gives the model's modules back their own forward; nothing happens where none was replaced."""
    for module in model.modules():
        if isinstance(module, Transformer | SpladePooling):
            module.__dict__.pop(BUDGET, None)
            module.__dict__.pop("forward", None)


def _pairs(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Every (Transformer, SpladePooling) that follow each other."""
    following = [pair for parent in model.modules() for pair in pairwise(parent.children())]
    pairs = [pair for pair in following if isinstance(pair[0], Transformer) and isinstance(pair[1], SpladePooling)]
    taken = {id(transformer) for transformer, _ in pairs}
    others = [after for module, after in following if id(module) in taken and not isinstance(after, SpladePooling)]
    if others:
        raise ConfigError(f"expected a Transformer for SpladePooling alone, got one that {others[0]} reads too")
    yield from pairs


def _check(transformer: Any, pooling: Any) -> None:
    if pooling.pooling_strategy != "max":
        raise ConfigError(
            f"SpladePooling: expected pooling_strategy='max', got {pooling.pooling_strategy!r}, whose gradient needs "
            "every token's logits; leave the model as it is"
        )
    if pooling.activation_function not in LOGS:
        raise HOST.error(f"SpladePooling has an activation_function {pooling.activation_function!r}")
    if transformer.backend != "torch":
        raise ConfigError(f"Transformer: expected backend 'torch', got {transformer.backend!r}")
    if transformer.transformer_task != "fill-mask":
        raise ConfigError(f"Transformer: expected transformer_task='fill-mask', got {transformer.transformer_task!r}")
    LMHead.of(causal_lm(transformer.model))


@functools.wraps(Transformer.forward, assigned=("__name__",), updated=())  # a pickled model has the class's own again
def _pooled(self: Any, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """The Transformer's own forward, with each document's maxima where its logits would be."""
    inner = causal_lm(self.model)
    dense = inner.forward
    flat = features.get(FLAT)

    def pool(head: LMHead, hidden: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
        hidden = hidden if offsets is None else hidden.squeeze(0)
        found = max_pool_logits(hidden, head, mask, offsets=offsets, memory_budget=self.__dict__[BUDGET])
        return found.values.to(head.weight.dtype)

    def forward(*args: Any, **given: Any) -> Any:
        with captured(inner, dense, *args, **given) as (hidden, output):
            mask = features.get("attention_mask") if flat is None else None
            output["logits"] = through_head(inner, pool, hidden, mask, flat)
        return output

    with replaced(inner, "forward", forward):
        return type(self).forward(self, features, **kwargs)


@functools.wraps(SpladePooling.forward, assigned=("__name__",), updated=())
def _activated(self: Any, features: dict[str, Any]) -> dict[str, Any]:
    """SpladePooling's forward on maxima."""
    maxima = features[LOGITS]
    if maxima.dim() != 2:
        raise HOST.error(f"expected each document's maxima from the Transformer, got {tuple(maxima.shape)}")
    features[EMBEDDING] = splade_activation(maxima, LOGS[self.activation_function])
    if self.embedding_dimension is None:
        self.embedding_dimension = maxima.shape[1]
    return features
