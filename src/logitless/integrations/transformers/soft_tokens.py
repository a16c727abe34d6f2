"""transformers models as what `relax.generate` needs: readers of soft tokens, and the tables that they read them by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ...models.instances import sees_ahead
from ...relax import Reader
from ...vocab.face import LMHead
from .lm_head import cache_name, causal_lm, forward_with, head_of

__all__ = ["reader_of", "table_of"]

PROBES = 8  # rows of an embedding table that are compared with what its module returns
KEEP_ALL = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")  # the last reads another layer's


def reader_of(model: Any, vocab_size: int, without_adapters: bool = False) -> Reader:
    """A causal LM, wrapped by PEFT or not, as the `Reader` that `relax.generate` takes.

    Dense equivalent: `body(embeds, mask, None)[0]` is `model.base_model(inputs_embeds=embeds).last_hidden_state`, with
    PEFT that of `model.get_base_model()`.
    vocab_size: how many entries there are, such as the tokenizer's highest id + 1; rows of padding behind do not exist.
    without_adapters: the model that PEFT's adapters were put on. Make it anew where an adapter is added, and after each
    step where an embedding is trained. Raises ConfigError for an embedding that is not a table, and for a model whose
    layers do not all keep keys and values of one shape. Memory: no copy, but of the table where the model multiplies
    its rows (Gemma).
    """
    _check_layers(causal_lm(model))
    if without_adapters and not hasattr(model, "disable_adapter"):
        raise ConfigError(
            f"without_adapters: expected a model that PEFT wraps, got {type(model).__name__}: give a copy of the model "
            "as it was in its place"
        )

    layers = _adapted(model) if without_adapters else []

    def aside() -> AbstractContextManager[Any]:
        return model.disable_adapter() if without_adapters and not layers else _disabled(layers)

    def body(embeds: Tensor, mask: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        with aside():
            return _read(model, embeds, mask, past)

    def head() -> LMHead:
        with aside():
            return replace(LMHead.of(model), vocab_size=vocab_size)

    return Reader(body, table_of(causal_lm(model), vocab_size), head)


def _adapted(model: Any) -> list[Any]:
    """The layers of a PeftModel that have adapters; none where PEFT does more than turn them off.

    As with a learned prompt, which no layer holds, and trained biases, which stay: PEFT warns of them.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if any(getattr(config, "bias", "none") != "none" for config in model.peft_config.values()):
        return []
    return [x for x in model.modules() if isinstance(x, BaseTunerLayer | AuxiliaryTrainingWrapper)]


@contextmanager
def _disabled(layers: list[Any]) -> Iterator[None]:
    """Layers without their adapters: `disable_adapter` also asks for every module's status, for as long as a token."""
    enabled = [layer for layer in layers if not layer.disable_adapters]
    try:
        for layer in enabled:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in enabled:
            layer.enable_adapters(True)


def _read(model: Any, embeds: Tensor, mask: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    from transformers import DynamicCache

    count = embeds.shape[1]
    cache = DynamicCache(None if past is None else _layers(past, causal_lm(model).config.get_text_config(), embeds))
    batch = {
        "inputs_embeds": embeds,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -count:],
        cache_name(model): cache,
        "use_cache": True,
    }
    hidden, _ = forward_with(model, batch, lambda inner, hidden: (hidden, head_of(inner)))
    layers: Any = cache.layers
    kept: list[Any] = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    _check_kept(causal_lm(model), kept)
    return hidden, torch.cat([x[:, :, -count:].permute(2, 0, 1, 3).flatten(1) for x in kept], 1)


def _check_layers(model: Any) -> None:
    """ConfigError where a layer keeps more or other than keys and values, as linear attention and indexers do.

    And where it sees what follows, which nothing does that was generated.
    """
    from transformers import DynamicCache

    if sees_ahead(model.config):
        raise _unfit(model, "tokens that see those before them alone", "an encoder's")

    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    found = sorted(kinds.difference(KEEP_ALL)) or ["a state"] * getattr(model, "_is_stateful", False)
    if found:
        raise _unfit(model, "layers that keep keys and values alone", ", ".join(found))


def _check_kept(model: Any, kept: list[Any]) -> None:
    """ConfigError unless every layer keeps keys and values, all of the shape that the configuration says."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    shapes = {None if x is None else (x.shape[1], x.shape[3]) for x in kept}
    if len(kept) != 2 * config.num_hidden_layers or {x and x[0] for x in shapes} != {heads} or len(shapes) != 1:
        found = ", ".join(sorted("none" if x is None else f"{x[0]}x{x[1]}" for x in shapes))
        needed = f"{config.num_hidden_layers} layers that keep keys and values of one shape, {heads} heads"
        raise _unfit(model, needed, f"{len(kept) // 2} with heads x width {found}")


def _unfit(model: Any, needed: str, got: str) -> ConfigError:
    name = type(model).__name__
    return ConfigError(f"{name}: methods on soft tokens need {needed}; got {got}: use another model")


def _layers(past: Tensor, config: Any, embeds: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (B, heads, m, width) of each layer, out of `past` (m, X)."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    parts = past.view(past.shape[0], config.num_hidden_layers, 2, embeds.shape[0], heads, -1)
    keys, values = parts.permute(2, 1, 3, 4, 0, 5)
    return list(zip(keys, values, strict=True))


def table_of(model: Any, vocab_size: int) -> Tensor:
    """The first `vocab_size` rows of a model's embedding, as its body reads them: `relax.soft_embedding`'s table.

    Dense equivalent: `model.get_input_embeddings()(torch.arange(vocab_size))`, (V, H), without a copy unless the model
    multiplies the rows (Gemma). Raises ConfigError where it has fewer rows, or does more than look them up.
    """
    module = model.get_input_embeddings()
    weight = module.weight
    if weight.shape[0] < vocab_size:
        raise ConfigError(f"vocab_size: expected {weight.shape[0]:,} at most, the embedding's rows, got {vocab_size:,}")
    table = weight if weight.shape[0] == vocab_size else weight[:vocab_size]
    scale = float(getattr(module, "scalar_embed_scale", 1.0))
    ids = torch.arange(min(PROBES, vocab_size), device=table.device)
    with torch.no_grad():
        same = torch.allclose(module(ids).float(), (table[ids] * scale).float(), rtol=1e-2, atol=1e-6)
    if not same:
        raise ConfigError(f"{type(model).__name__}: its embedding is not a plain table, which soft tokens need")
    return table if scale == 1.0 else table * scale
