"""Heads that predict the tokens further on, trained beside a transformers model's own by `install(multi_token=...)`.

`MtpModules` are transformers' multi-token prediction modules (DeepSeek-V3, GLM-4-MoE and others), `MedusaHeads`
residual blocks with vocabularies of their own; any other kind is a `MultiToken` with `depths`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...algebra.options import MOST_FLOAT
from ...errors import ConfigError, OptionError, ShapeError
from ...multi_token import floats_of
from ...vocab.face import LMHead, unwrapped
from .lm_head import SHARDED, output_head

NAME = "multi_token"  # of the attribute in which an installed model has its modules


class MultiToken(nn.Module):
    """Modules whose losses `install(multi_token=...)` adds to the model's own, in one pass for all that share a head.

    Dense equivalent of a call with labels, in which depth k predicts the token 2 + k further on:

        hiddens = modules.depths(hidden, input_ids, position_ids)
        logits = [head(x) for head, x in zip(heads, hiddens)]
        each = [
            F.cross_entropy(z[..., : -2 - k, :].flatten(0, -2), labels[..., 2 + k :].flatten())
            for k, z in enumerate(logits)
        ]
        loss = main_weight * model_loss + sum(weight * x for weight, x in zip(weights, each))

    weights: a number for each depth. main_weight: of the model's own loss; 0 leaves its product out, as for a frozen
    model. A subclass has `depths`, and `heads` where the model's own is not theirs. After a call `each` has the mean of
    the model's own loss, unless its weight is 0, and those of every depth, without gradient. Raises OptionError.
    """

    def __init__(self, weights: Sequence[float], main_weight: float = 1.0) -> None:
        super().__init__()
        found = floats_of((*weights, main_weight), MOST_FLOAT)
        if len(found) < 2:
            raise OptionError(
                "weights, main_weight: expected finite numbers, in float32 too, one for each depth, got "
                f"{tuple(weights)!r} and {main_weight!r}"
            )
        self.weights, self.main_weight = tuple(found[:-1]), found[-1]
        self.each: Tensor | None = None

    def depths(self, hidden: Tensor, input_ids: Tensor, position_ids: Tensor | None) -> list[Tensor]:
        """The hidden states (B, T, H) of each depth, of the model's own (B, T, H) and the text (B, T) that it read."""
        raise NotImplementedError

    def heads(self, head: LMHead) -> list[LMHead]:
        """The head of each depth: the model's own."""
        return [head] * len(self.weights)


class MtpModules(MultiToken):
    """transformers' `MtpModel` beside its model, whose embedding and head it shares.

    weights: 0.3 over the number of modules for each unless given, DeepSeek-V3's (arXiv 2412.19437). Raises what
    `MultiToken` raises. Memory: the modules' own.
    """

    def __init__(self, mtp: Any, weights: Sequence[float] | None = None, main_weight: float = 1.0) -> None:
        count = len(mtp.layers)
        super().__init__([0.3 / count] * count if weights is None else weights, main_weight)
        if len(self.weights) != count:
            raise OptionError(f"weights: expected {count}, one for each module, got {len(self.weights)}")
        self.layers = mtp.layers
        if getattr(mtp, "use_shared_post_norm", False):
            self.shared_post_norm = mtp.shared_post_norm
        self.__dict__["mtp"] = mtp  # not as a module: what it shares is the model's, which has this one

    def depths(self, hidden: Tensor, input_ids: Tensor, position_ids: Tensor | None) -> list[Tensor]:
        return mtp_hidden_states(self.mtp, hidden, input_ids, position_ids)


class MedusaHeads(MultiToken):
    """Medusa's heads (arXiv 2401.10774): a residual block and a vocabulary for each of `count` depths.

    They begin as the model's own head: blocks of zeros, and copies of its weight and bias; its scale and softcap are
    theirs. weights: 0.8^k for the head of the token 1 + k further on unless given. main_weight: 0 beside a frozen model
    (Medusa-1). Raises what `MultiToken` raises, and ConfigError for a head that is sharded or quantised.
    Memory: count · (H·H + V·H) parameters.
    """

    def __init__(
        self, model: nn.Module, count: int, weights: Sequence[float] | None = None, main_weight: float = 1.0
    ) -> None:
        super().__init__([0.8 ** (1 + k) for k in range(count)] if weights is None else weights, main_weight)
        if len(self.weights) != count:
            raise OptionError(f"weights: expected {count}, one for each head, got {len(self.weights)}")
        head: Any = unwrapped(output_head(model))
        if any(hasattr(head.weight, mark) for mark in SHARDED) or not head.weight.is_floating_point():
            raise ConfigError(
                "model: expected a head that is whole and of plain numbers; make these before it is sharded"
            )
        like = {"dtype": head.weight.dtype, "device": head.weight.device}
        width, bias = head.weight.shape[1], getattr(head, "bias", None)
        blocks = [nn.Linear(width, width, **like) for _ in range(count)]
        vocabularies = [nn.Linear(*head.weight.T.shape, bias=bias is not None, **like) for _ in range(count)]
        with torch.no_grad():
            for block, vocabulary in zip(blocks, vocabularies, strict=True):
                block.weight.zero_()
                block.bias.zero_()
                vocabulary.weight.copy_(head.weight)
                if bias is not None:
                    vocabulary.bias.copy_(bias)
        self.blocks, self.vocabularies = nn.ModuleList(blocks), nn.ModuleList(vocabularies)

    def depths(self, hidden: Tensor, input_ids: Tensor, position_ids: Tensor | None) -> list[Tensor]:
        return [hidden + F.silu(block(hidden)) for block in self.blocks]

    def heads(self, head: LMHead) -> list[LMHead]:
        own = [(x.weight, x.bias) for x in self.vocabularies]
        return [replace(head, weight=weight, bias=bias, adapters=()) for weight, bias in own]


def attach(model: Any, modules: MultiToken) -> None:
    """Makes them the model's own, in the place of those that it had. Raises OptionError, ConfigError."""
    if not isinstance(modules, MultiToken):
        got = type(modules).__name__
        raise OptionError(f"multi_token: expected MtpModules, MedusaHeads or a MultiToken, got {got}")
    if hasattr(model, NAME) and attached(model) is None:
        raise ConfigError(f"multi_token: {type(model).__name__} has an attribute of that name: expected none")
    setattr(model, NAME, modules)


def attached(model: Any) -> MultiToken | None:
    found = model._modules.get(NAME)
    return found if isinstance(found, MultiToken) else None


def text_of(given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """(input_ids, position_ids) of a call, both (B, T). Raises ConfigError for what modules cannot read."""
    ids, places, mask = given.get("input_ids"), given.get("position_ids"), given.get("attention_mask")
    if not isinstance(ids, Tensor):
        raise ConfigError("multi_token: expected input_ids, which its modules read too, got a call without them")
    if places is not None and places.ndim != 2:
        raise ConfigError(f"multi_token: expected position_ids (B, T), got {tuple(places.shape)}")
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, 0].all()):
        raise ConfigError("multi_token: expected sequences padded on the right, got some padded on the left")
    return ids, None if places is None else places.expand_as(ids)


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
    one; the main model's own predicts t + 1. (`MtpModel.forward` drafts; with labels transformers 5.24 ends in a
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
