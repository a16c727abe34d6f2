"""transformers' multi-token prediction modules in training, where each reads the text's own tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, ShapeError


def mtp_hidden_states(
    mtp: Any,
    hidden: Tensor,  # (B, T, H)
    input_ids: Tensor,  # (B, T)
    position_ids: Tensor | None = None,  # (B, T)
) -> list[Tensor]:
    """The hidden states (B, T, H) of each depth of transformers' `MtpModel`, for `multi_token_cross_entropy`.

    Dense equivalent:

        for k, layer in enumerate(mtp.layers):  # with its mask and its rotary embedding
            hidden = layer(mtp.embed_tokens(input_ids.roll(-1 - k, 1)), hidden)

    Depth k reads, at token t, the hidden state of the depth before and the true token t + 1 + k, and predicts the next
    one; the main model's own predicts t + 1. (`MtpModel.forward` drafts; with labels transformers 5.23 ends in a
    TypeError.) hidden: of the main model, as `hidden_states` gives it. input_ids: what that has read, padded on the
    right where at all. position_ids: those of packed documents, which the modules' attention then keeps apart. The
    last 1 + k tokens of depth k read what is not there, and have no label. Raises ShapeError, and
    ConfigError for a model that divides the hidden states before its head (Inkling).
    Memory: the modules' own.
    """
    if hidden.shape[:-1] != input_ids.shape:
        raise ShapeError(f"input_ids: expected {tuple(hidden.shape[:-1])}, as hidden has, got {tuple(input_ids.shape)}")
    if getattr(mtp.config, "logits_mup_width_multiplier", None) is not None:
        raise ConfigError(
            "mtp: expected a model whose head takes the modules' hidden states, got one that divides them"
        )
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    found = []
    for k in range(len(mtp.layers)):
        reads, places = input_ids.roll(-1 - k, 1), position_ids + 1 + k
        hidden = mtp.forward_layer(k, hidden, places, None, input_ids=reads)
        found.append(hidden)
    return found
