"""torchtitan's loss from hidden states: the logits of no chunk of the sequence are made.

    torchrun -m torchtitan.train --module llama3 --config llama3_8b --training.disable_cuda_graphs \
        --override.imports logitless.integrations.torchtitan.streamed

Works with torchtitan 0.3: its trainer hands the output head to a `ChunkedLossWrapper`, and this is one.
"""

# ruff: noqa: E402 - the seam is looked at before what it names is imported
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..vocab.face import LMHead, linear_cross_entropy
from .seam import Seam
from .transformers.lm_head import replaced

LOSS = "torchtitan.components.loss:"
HOST = Seam(
    "torchtitan",
    ">=0.3,<0.4",
    {
        f"{LOSS}ChunkedLossWrapper.__init__": ("self", "config", "compile_config"),
        f"{LOSS}ChunkedLossWrapper.__call__": ("self", "pred", "labels", "global_valid_tokens", "loss_inputs"),
        f"{LOSS}ChunkedLossWrapper.set_lm_head": ("self", "lm_head"),
        f"{LOSS}CrossEntropyLoss.Config": ("global_vocab_size",),
        "torchtitan.models.common.decoder:Decoder._skip_lm_head": (),
        "torchtitan.models.common.linear:Linear": (),
        "torchtitan.models.muse_glimmer.model:SoftCappedLinear.forward": ("self", "input"),
        "torchtitan.config.override:override": ("target", "fqns", "description", "exact"),
    },
)
HOST.require()

import spmd_types as spmd
from torchtitan.components.loss import (
    IGNORE_INDEX,
    BaseLoss,
    ChunkedLossWrapper,
    CrossEntropyLoss,
)
from torchtitan.config import CompileConfig
from torchtitan.config.override import override
from torchtitan.models.common.linear import Linear
from torchtitan.models.muse_glimmer.model import SoftCappedLinear


class StreamedLoss(ChunkedLossWrapper):
    """Cross-entropy of the output head's logits, summed over tokens or divided by `global_valid_tokens`.

    Dense equivalent:

        CrossEntropyLoss(config)(lm_head(pred), labels, global_valid_tokens)

    Sequences of any length; the gradient follows whatever is done to the loss. The head computes inside its own call,
    so that FSDP2 gathers its weight once and reduces its gradient once. One head on every rank: tensor parallelism
    and DTensor activations are ConfigErrors.
    Memory: slices within the budget, the gradients of hidden states and head.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        memory_budget: int | None = None
        """Bytes of slices, 256 MiB unless given, up to 1 GiB on a GPU."""

        z_loss: float = 0.0
        """Weight of the squared log-sum-exp in training; losses of validation, without a gradient, are without it."""

        backend: str | None = None
        """The pass's backend, chosen unless given."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        self.options = {"memory_budget": config.memory_budget, "backend": config.backend}
        self.z_loss = config.z_loss
        self.lm_head: nn.Module | None = None

    def __call__(
        self,
        pred: Tensor,  # (B, L, D) hidden states
        labels: Tensor,  # (B, L)
        global_valid_tokens: Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the loss, no metrics), as `CrossEntropyLoss` returns them; loss_inputs are not looked at, as there."""
        lm_head = self.lm_head
        if lm_head is None:
            raise HOST.error("the trainer gave the loss no lm_head, expected a call of set_lm_head")

        def forward(hidden: Tensor) -> Tensor:
            return linear_cross_entropy(
                hidden,
                head_of(lm_head),
                labels,
                reduction="sum" if global_valid_tokens is None else "mean",
                denominator=global_valid_tokens,
                ignore_index=IGNORE_INDEX,
                z_loss=self.z_loss if torch.is_grad_enabled() else 0.0,
                **self.options,
            )

        checked = spmd.is_type_checking()
        with spmd.no_typecheck(), replaced(lm_head, "forward", forward):
            loss = lm_head(pred)
            if checked:  # torchtitan's types, which know none of the pass' functions: those of its own losses
                spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, {}


def head_of(lm_head: Any) -> LMHead:
    """The head of a torchtitan model, within its own call. Raises ConfigError."""
    weight, shape = lm_head.weight, (lm_head.out_features, lm_head.in_features)
    if type(weight).__name__ == "DTensor" or tuple(weight.shape) != shape:
        raise ConfigError(
            f"lm_head: expected its whole weight {shape}, got {type(weight).__name__} {tuple(weight.shape)}; "
            "leave tensor_parallel_degree at 1 and spmd_backend at spmd_types, or torchtitan's own loss"
        )
    if type(lm_head).forward is SoftCappedLinear.forward:
        return LMHead(weight, lm_head.bias, scale=lm_head.output_multiplier, softcap=lm_head.output_soft_cap_temp)
    if type(lm_head).forward is not Linear.forward:
        raise ConfigError(
            f"lm_head: expected a Linear or SoftCappedLinear, got {type(lm_head).__name__} with a forward of its own; "
            "take torchtitan's own loss"
        )
    return LMHead(weight, lm_head.bias)


@override(target=BaseLoss.Config, fqns=["loss"], description="cross-entropy without logits")
def streamed(config: Any, **options: Any) -> StreamedLoss.Config:
    """The same loss without logits, for `--override.imports`; options: those of `StreamedLoss.Config`."""
    if isinstance(config, StreamedLoss.Config):
        return replace(config, **options)
    inner = config.loss_fn if isinstance(config, ChunkedLossWrapper.Config) else config
    if type(inner) is not CrossEntropyLoss.Config:
        raise ConfigError(
            f"loss: expected CrossEntropyLoss, chunked or not, got {type(inner).__qualname__}; write it with token_loss"
        )
    return StreamedLoss.Config(**options)
