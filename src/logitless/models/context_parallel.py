"""Sequences shared by the ranks of a group: each holds a part, and its queries meet the keys of all parts before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from ..errors import ConfigError, OptionError
from ..vocab.face import group_named
from .instances import PROJECTIONS, attention_layers
from .packed import packed_attention
from .positions import changes_with_length

NAME = "logitless_context_parallel"
PART = "context_part"  # an attention layer's place for its rank's part
UNKNOWN = ("s_aux", "softcap", "position_bias", "indices")  # what transformers' layers may hand to attention
IGNORED = -100


@dataclass(frozen=True)
class Part:
    """Which part of every sequence a rank holds: the `rank`-th of `ranks`, of one length."""

    rank: int
    ranks: int
    group: str  # the process group's name, which can be copied with a model

    @classmethod
    def of(cls, group: Any) -> Part:
        return cls(dist.get_rank(group), dist.get_world_size(group), group.group_name)

    @property
    def process_group(self) -> Any:
        return group_named(self.group)

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(B, kv_heads, T, D) twice -> the keys and values from the sequence's first to this part's last.

        In backward the gradients of a part, of all the ranks that met it, are summed where it lies. Every rank gets
        all parts, those after its own too, in one collective each way.
        """
        keys, values = _Gathered.apply(torch.stack((key, value)), self)  # pyright: ignore[reportGeneralTypeIssues]
        return keys, values

    def cut(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch of whole sequences, (B, S) each -> this rank's part of it, (B, S / ranks).

        Labels are shifted before: the last token of a part is followed by the first one of the next. They come as
        `shift_labels` too, which is what keeps a model from shifting them again. A mask of ones is left out. Raises
        OptionError, on every rank, for padding and for a length that ranks cannot share.
        """
        whole = dict(batch)
        mask = whole.pop("attention_mask", None)
        if mask is not None and not mask.all():
            padding = int((mask == 0).sum())
            raise OptionError(f"--context-parallel: expected packed rows, got padding: {padding} tokens")
        length = batch["input_ids"].shape[1]
        if length % self.ranks:
            raise OptionError(f"expected sequences that {self.ranks} ranks can share evenly, got {length} tokens")
        at = slice(self.rank * length // self.ranks, (self.rank + 1) * length // self.ranks)
        shifted = pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        places = torch.arange(length, device=shifted.device).expand_as(shifted)
        whole = {"position_ids": places, **whole, "labels": shifted, "shift_labels": shifted}
        return {name: tensor[:, at].contiguous() for name, tensor in whole.items()}


class _Gathered(torch.autograd.Function):
    """Plain collectives: torch's functional ones with gradients corrupt the memory of gloo's ranks (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, part: Part) -> tuple[Tensor, Tensor]:  # (2, B, kv_heads, T, D)
        parts = mine.new_empty((part.ranks, *mine.shape))
        dist.all_gather(list(parts.unbind(0)), mine, group=part.process_group)
        ctx.part = part
        keys, values = torch.cat(parts[: part.rank + 1].unbind(0), dim=3).unbind(0)
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        part: Part = ctx.part
        parts = [x.contiguous() for x in torch.stack(gradients).chunk(part.rank + 1, dim=3)]
        parts += [torch.zeros_like(parts[0])] * (part.ranks - len(parts))
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=part.process_group)
        return mine, None


def attach(model: Any, group: Any) -> Any:
    """Lets the attention of a model's layers, sparse (nsa) or full, see the parts of its group's other ranks.

        part = Part.of(group)
        model = attach(model, group)
        loss = model(**part.cut(batch), num_items_in_batch=count_tokens(part.cut(batch)["labels"], group)).loss

    The ranks' losses add up to that of the whole batch, and their gradients too: an engine that averages over D ranks
    wants each loss times D. Position ids restart at every document, and tell documents apart. Everything else in a
    layer is done token by token. group: a process group. Raises ConfigError for a model that mixes tokens in another
    way, drops attention or whose rotary embeddings depend on the longest position, and leaves it as it was; calls
    raise it for masks that are more than causal, windowed and of documents.

    Memory: besides a part's own, a layer's keys and values of the whole sequence, (B, kv_heads, S, D) twice, kept for
    backward where the layer is not checkpointed.
    """
    config = model.config.get_text_config()
    layers = attention_layers(model, "--context-parallel")
    if len(layers) != config.num_hidden_layers:
        raise ConfigError(f"--context-parallel: {type(model).__name__} has layers without {', '.join(PROJECTIONS)}")
    check_config(config)
    part = Part.of(group)
    for layer in layers:
        setattr(layer, PART, part)
    if not any(hasattr(layer, "nsa") for layer in layers):
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, window_or_padding)
        model.set_attn_implementation(NAME)
    return model


def check_config(config: Any) -> None:
    """ConfigError for a configuration of a model that parts of sequences would change."""
    text = config.get_text_config()
    if kind := changes_with_length(text):
        raise ConfigError(
            f"--context-parallel: {kind} rotary embeddings depend on the longest position of a part; use yarn or linear"
        )
    if dropout := getattr(text, "attention_dropout", 0.0):
        raise ConfigError(
            f"--context-parallel knows no attention dropout, got {dropout}: set attention_dropout to 0 in the config"
        )


def gathered(
    module: Any, key: Tensor, value: Tensor, attention_mask: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The keys and values that a layer's queries are the last of: its own, or those of the parts before it too.

    Raises ConfigError for parts that say in another way than by positions which tokens belong together.
    """
    part: Part | None = getattr(module, PART, None)
    if part is None:
        return key, value
    if attention_mask is not None or positions is None:
        got = "an attention_mask" if positions is not None else "attention without position_ids"
        raise ConfigError(f"--context-parallel: expected documents told apart by position_ids alone, got {got}")
    return part.gathered(key, value)


def window_or_padding(local_size: int | None = None, use_vmap: bool = False, **given: Any) -> Tensor | int | None:
    """transformers' mask interface: a layer's window in place of its mask, whether the layer itself knows it or not.

    Padding is given as flash attention has it. Raises ConfigError.
    """
    windows = (None, getattr(given["config"], "sliding_window", None))
    if use_vmap or local_size not in windows or "allow_is_bidirectional_skip" in given:
        raise ConfigError("--context-parallel: expected a causal mask with or without a sliding window, got another")
    padding = flash_attention_mask(**given)
    return local_size if padding is None else padding


def attend(
    module: Any,
    query: Tensor,  # (B, heads, T, D)
    key: Tensor,  # (B, kv_heads, T, D)
    value: Tensor,
    attention_mask: Tensor | int | None,  # of `window_or_padding`
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: this part's queries and the keys so far. Raises ConfigError."""
    if unknown := [name for name in UNKNOWN if more.get(name) is not None]:
        raise ConfigError(f"--context-parallel knows no {unknown[0]} in attention; train without it")
    if dropout:
        raise ConfigError(f"--context-parallel knows no attention dropout, got {dropout}")
    if key.shape[2] != query.shape[2]:
        raise ConfigError(f"--context-parallel: expected no cache, got {key.shape[2] - query.shape[2]} keys of one")
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast a norm widens them
    positions: Any = more.get("position_ids")
    window, mask = (attention_mask, None) if isinstance(attention_mask, int) else (None, attention_mask)
    keys, values = gathered(module, key, value, mask, positions)
    result = packed_attention(query, keys, values, positions, scaling, window)
    return result.transpose(1, 2), None
