"""Native Sparse Attention in a transformers model of Qwen3's shape: its parameters, and its place in the model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from ...errors import ConfigError
from ...vocab.face import current_sizing
from ..context_parallel import gathered
from ..instances import attention_layers
from .attention import nsa
from .options import NSAOptions, options_of

NAME = "logitless_nsa"


class NSAParameters(nn.Module):
    """What sparse attention adds to a layer: keys and values compressed block by block, and three gates per head.

    Compression is a linear map of a block's keys end to end, so that each place in the block has weights of its own;
    it starts as their mean. The gates are sigmoids of the layer's input and start at a half.
    """

    def __init__(self, hidden: int, heads: int, head_dim: int, options: NSAOptions) -> None:
        super().__init__()
        self.options = options.check()
        self.gates = nn.Linear(hidden, 3 * heads)
        self.compress_key = nn.Linear(options.block * head_dim, head_dim)
        self.compress_value = nn.Linear(options.block * head_dim, head_dim)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        for linear in (self.gates, self.compress_key, self.compress_value):
            linear.weight.zero_()
            linear.bias.zero_()
        for linear in (self.compress_key, self.compress_value):
            mean = torch.eye(linear.out_features, dtype=linear.weight.dtype, device=linear.weight.device)
            linear.weight.copy_(mean.repeat(1, self.options.block) / self.options.block)

    def compress(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(kv_heads, S, D) twice -> (kv_heads, compressed(S), D) twice."""
        return self._compressed(key, self.compress_key), self._compressed(value, self.compress_value)

    def _compressed(self, x: Tensor, linear: nn.Linear) -> Tensor:
        if self.options.compressed(x.shape[1]) == 0:  # a gradient of zeros, so that ranks reduce the same parameters
            return linear(x.new_zeros(x.shape[0], 0, linear.in_features))
        return linear(x.unfold(1, self.options.block, self.options.stride).transpose(-1, -2).flatten(-2))


def attend(
    module: Any,
    query: Tensor,  # (B, heads, T, D)
    key: Tensor,  # (B, kv_heads, S, D)
    value: Tensor,
    attention_mask: Tensor | None,  # of `padding`
    scaling: float,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: every document of every row by itself. Raises ConfigError."""
    if not hasattr(module, "nsa"):
        raise ConfigError(
            "nsa: this model was loaded without its parameters; logitless.models.nsa.saved.load reads them"
        )
    if dropout:
        raise ConfigError(f"nsa knows no attention dropout, got {dropout}: set attention_dropout to 0 in the config")
    if attention_mask is not None and attention_mask.dim() != 2:
        got = tuple(attention_mask.shape)
        raise ConfigError(f"nsa: expected an attention_mask of padding, (B, S), got shape {got}; use position_ids")
    parameters, gates = module.nsa, more["nsa_gates"]
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast a norm widens them
    key, value = gathered(module, key, value, attention_mask, more.get("position_ids"))
    if attention_mask is not None:  # what is filled of a cache of static length
        key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))
    length, offset = query.shape[2], key.shape[2] - query.shape[2]
    rows: list[list[Tensor]] = [[] for _ in query]
    for row, begin, end in documents(attention_mask, more.get("position_ids"), key, length):
        if end <= offset:  # padded at the right: none of its tokens asks
            continue
        asked = slice(max(begin - offset, 0), end - offset)
        keys, values = key[row, :, begin:end], value[row, :, begin:end]
        compressed = parameters.compress(keys, values)
        gate = gates[row, :, :, asked]
        done = nsa(query[row, :, asked], keys, values, compressed[0], compressed[1], gate, scaling, parameters.options)
        before = asked.start - sum(part.shape[1] for part in rows[row])
        rows[row] += [_nothing(query, before), done]
    for parts in rows:
        parts.append(_nothing(query, length - sum(part.shape[1] for part in parts)))
    return torch.stack([torch.cat(parts, dim=1) for parts in rows]).transpose(1, 2), None


def _nothing(query: Tensor, length: int) -> Tensor:
    """The result of so many padded queries, (heads, length, D)."""
    return query.new_zeros(query.shape[1], length, query.shape[3])


def padding(
    *, kv_length: int, q_length: int = 0, q_offset: int | Tensor = 0, attention_mask: Tensor | None = None, **given: Any
) -> Tensor | None:
    """transformers' mask interface: which of the tokens so far count, (B, S); None where all do and S is kv_length."""
    places = given.get("cache_position")
    if places is not None:  # what transformers before 5.4 says instead
        q_length, q_offset = len(places), places[0]
    length = int(q_offset) + q_length  # less than kv_length where the cache is of static length
    if attention_mask is not None:
        mask = pad(attention_mask, (0, length - attention_mask.shape[1]))
        return None if length == kv_length and mask.all() else mask
    if length == kv_length:
        return None
    return torch.ones(given["batch_size"], length, dtype=torch.bool, device=given["device"])


def documents(mask: Tensor | None, positions: Tensor | None, key: Tensor, length: int) -> list[tuple[int, int, int]]:
    """(row, first key, end) of each document: between padding, or where the positions of packed rows start anew.

    The first of the last `length` tokens, which are all that asks, may be in the middle of its document. Raises
    ConfigError for a mask with padding inside of a row.
    """
    rows, keys = key.shape[0], key.shape[2]
    if mask is not None and not mask.all():
        inside = [row.nonzero().flatten() for row in mask]
        found = [(i, int(at[0]), int(at[-1]) + 1) for i, at in enumerate(inside) if len(at)]
        if holes := [row for row, begin, end in found if end - begin > len(inside[row])]:
            raise ConfigError(
                f"nsa: expected an attention_mask with padding before or after a row's tokens, got row {holes[0]} with "
                "some between them; tell packed documents apart by position_ids"
            )
        return found
    if positions is None or current_sizing() is not None:  # whole rows, which need the most
        return [(row, 0, keys) for row in range(rows)]
    found, offset = [], keys - length
    for row, places in enumerate(positions.expand(rows, -1)):
        inner = (places.diff() != 1).nonzero().flatten() + offset + 1
        starts = [max(0, offset - int(places[0])), *inner.tolist(), keys]
        found += [(row, begin, end) for begin, end in pairwise(starts)]
    return found


def _gates(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a layer's attention: its gates from its input, (B, 3, heads, T), handed on to `attend`."""
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    gates = torch.sigmoid(module.nsa.gates(hidden)).unflatten(-1, (3, -1)).permute(0, 2, 3, 1)
    return args, {**kwargs, "nsa_gates": gates}


def attach(model: Any, options: NSAOptions | None = None) -> Any:
    """Gives every attention layer of a Qwen3-shaped model sparse attention; the config's `nsa` says with which sizes.

    Adds `self_attn.nsa` to each layer, saved with the model; `load_parameters` reads them back. Raises ConfigError
    for a model whose attention is of another kind, and leaves it as it was.
    """
    config = model.config.get_text_config()
    options = options_of(config) if options is None else options.check()
    layers = attention_layers(model, "nsa", "sliding_window")
    if any(hasattr(layer, "nsa") for layer in layers):
        raise ConfigError("this model has nsa already")
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding)
    model.set_attn_implementation(NAME)
    for layer in layers:
        weight = layer.q_proj.weight
        parameters = NSAParameters(weight.shape[1], weight.shape[0] // layer.head_dim, layer.head_dim, options)
        layer.nsa = parameters.to(weight.device, weight.dtype)
        layer.register_forward_pre_hook(_gates, with_kwargs=True)
    config.nsa = options.to_dict()
    model.config.attn_implementation = NAME  # saved with it: transformers alone refuses what it would misread
    return model
