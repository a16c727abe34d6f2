"""NeMo Automodel's loss from hidden states, for its fine-tuning, distillation and multi-token prediction recipes.

    loss_fn:
      _target_: logitless.integrations.automodel.StreamedCrossEntropy

Works with nemo-automodel 0.7: its recipes hand hidden states to a `LinearCrossEntropy`, and the head with its model's
configuration to a `ChunkedCrossEntropy`, which this is, so that a softcap or a scale is found and not forgotten.
"""

# ruff: noqa: E402 - the seam is looked at before what it names is imported
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ShapeError
from ..vocab.face import LMHead, linear_cross_entropy, token_loss, transforms_of
from .seam import Seam

LOSS = "nemo_automodel.components.loss."
CHUNKED = f"{LOSS}chunked_ce:ChunkedCrossEntropy"
HOST = Seam(
    "nemo-automodel",
    ">=0.7,<0.8",
    {
        f"{CHUNKED}.__init__": ("self", "chunk_len", "compile", "ignore_index", "reduction"),
        f"{CHUNKED}.validate_lm_head": ("lm_head", "model_config"),
        f"{CHUNKED}.prepare_lm_weight": ("self", "lm_head", "model_config", "grad_reduce_group"),
        f"{CHUNKED}.forward": (
            "self",
            "hidden_states",
            "labels",
            "lm_weight",
            "num_label_tokens",
            "grad_reduce_group",
            "loss_weights",
            "mask",
            "logits_dtype",
        ),
        f"{LOSS}linear_ce_base:LinearCrossEntropy.materialize_lm_weight": ("lm_weight", "grad_reduce_group"),
    },
)
HOST.require()

from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy

# Models by type: Automodel's own that hand out hidden states which are scaled already, ...
SCALED = frozenset({"muse_glimmer"})
# ... and those that divide them by this between where they hand them out and their head.
DIVIDES = {
    "minicpm3": "logits_scaling",
    "inkling_text": "logits_mup_width_multiplier",
    "inkling_mm_model": "logits_mup_width_multiplier",
}


class StreamedCrossEntropy(ChunkedCrossEntropy):
    """Cross-entropy of the model's logits without the logits of any chunk of tokens.

    Dense equivalent:

        MaskedCrossEntropy(ignore_index, reduction)(model(**batch).logits, labels, num_label_tokens)

    ignore_index, reduction: as of Automodel's losses; memory_budget: bytes of slices, 256 MiB unless given, up to 1 GiB
    on a GPU; backend: the pass's, chosen unless given. The head's weight is materialised as by Automodel's own losses,
    once for the main loss and all depths of multi-token prediction, and its gradient reduced in its way. Softcap, scale
    and padded rows are read from the model's configuration. Raises ConfigError for a head with a bias or a forward of
    its own.
    Memory: slices within the budget, the gradients of hidden states and head.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "sum",
        memory_budget: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(compile=False, ignore_index=ignore_index, reduction=reduction)
        self.options = {"ignore_index": ignore_index, "memory_budget": memory_budget, "backend": backend}
        self.transforms: dict[str, Any] = {}

    def validate_lm_head(self, lm_head: nn.Module | None, *, model_config: Any = None) -> nn.Linear:
        """The head itself, once it is known what the model makes of its logits."""
        if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
            raise ConfigError(
                f"lm_head: expected an nn.Linear, got {type(lm_head).__name__}; take MaskedCrossEntropy, or token_loss "
                "with an LMHead of your own"
            )
        if lm_head.bias is not None:
            raise ConfigError(
                "lm_head: expected no bias, which Automodel does not hand to a loss; take MaskedCrossEntropy"
            )
        if model_config is not None:
            scale, softcap, rows = transforms_of(model_config, type(model_config).__name__)
            scale = _scale_of_handed_out(model_config, scale)
            rows = None if rows is None or rows >= lm_head.out_features else rows
            self.transforms = {"scale": scale, "softcap": softcap, "vocab_size": rows}
        return lm_head

    def forward(
        self,
        hidden_states: Tensor,  # (..., H)
        labels: Tensor,  # (...)
        lm_weight: Tensor,  # (V, H)
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,  # (...)
        *,
        mask: Tensor | None = None,  # (...)
        logits_dtype: Any = None,
    ) -> Tensor:
        """The loss, as Automodel's own; logits are not rounded, so that logits_dtype changes nothing."""
        if (num_label_tokens is not None or loss_weights is not None) and self.reduction != "sum":
            raise ConfigError(f"num_label_tokens and loss_weights: expected reduction='sum', got {self.reduction!r}")
        if hidden_states.ndim == labels.ndim + 2 and hidden_states.shape[0] == 1:  # a packed batch
            hidden_states = hidden_states.squeeze(0)
        labels = labels.to(hidden_states.device)
        if mask is not None and mask.shape != labels.shape:
            raise ShapeError(f"mask: expected one number a label, {tuple(labels.shape)}, got {tuple(mask.shape)}")
        if mask is not None:
            labels = labels.masked_fill(mask.to(labels.device) == 0, self.ignore_index)
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        head, hidden = LMHead(weight, **self.transforms), hidden_states.to(weight.dtype)
        if loss_weights is None:
            loss = linear_cross_entropy(hidden, head, labels, reduction=self.reduction, **self.options)
        else:
            inputs = (loss_weights.to(hidden.device, torch.float32),)
            loss = token_loss(_weighted, hidden, head, labels, inputs=inputs, reduction="sum", **self.options)
        if num_label_tokens is None:
            return loss
        return loss / num_label_tokens if num_label_tokens else loss * 0.0


def _scale_of_handed_out(config: Any, scale: float) -> float:
    """What logits are multiplied with where `scale` is that of the hidden states that the head is called with."""
    kind = getattr(config, "model_type", "")
    if kind in SCALED and type(config).__module__.startswith("nemo_automodel."):
        return 1.0
    divisor = DIVIDES.get(kind)
    return scale if divisor is None else scale / getattr(config.get_text_config(), divisor)


def _weighted(stats: Any, weights: Tensor) -> Tensor:
    return -weights * stats.logprob
