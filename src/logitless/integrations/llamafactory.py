"""LLaMA-Factory's v1 fine-tuning without logits, as a kernel that its configuration names.

    kernel_config:
      name: logitless

    python -m logitless.integrations.llamafactory train.yaml  # or torchrun -m, the same

Works with LLaMA-Factory 0.9.5: its trainer wants log-probs of a model, which its `compute_log_probs` reads from logits;
of a model that has the kernel they come from hidden states.
"""

# ruff: noqa: E402 - the seam is looked at before what it names is imported
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..vocab.face import LMHead, token_stats
from .seam import Seam
from .transformers.lm_head import causal_lm, forward_with, through_head

TRAINER = "llamafactory.v1.core.base_trainer:BaseTrainer"
HOST = Seam(
    "llamafactory",
    ">=0.9.5,<0.9.6",
    {
        f"{TRAINER}.compute_log_probs": ("self", "model", "batch"),
        f"{TRAINER}.fit": ("self",),
        "llamafactory.v1.plugins.model_plugins.kernels.interface:KernelPlugin.register": ("self", "method_name"),
        "llamafactory.v1.accelerator.interface:Dim.CP": (),
        "llamafactory.v1.trainers.sft_trainer:run_sft": ("args",),
    },
)
HOST.require()

from llamafactory.v1.accelerator.interface import Dim, DistributedInterface
from llamafactory.v1.core.base_trainer import BaseTrainer
from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin
from llamafactory.v1.trainers.sft_trainer import SFTTrainer, run_sft

MARK = "_logitless"
compute_log_probs, fit = BaseTrainer.compute_log_probs, BaseTrainer.fit


@KernelPlugin("logitless").register()
def apply(model: Any, include_kernels: Any = None) -> Any:
    """The model, whose log-probs LLaMA-Factory's trainers then get without logits. Raises ConfigError.

    include_kernels: LLaMA-Factory's own kernels to apply beside it, as with `name: auto`.
    """
    inner = causal_lm(model)
    if DistributedInterface().get_world_size(Dim.CP) > 1:
        raise ConfigError("kernel_config: logitless: expected cp_size 1, whose loss LLaMA-Factory computes elsewhere")
    if BaseTrainer.compute_log_probs not in (compute_log_probs, _compute_log_probs):
        raise HOST.error("something else has replaced BaseTrainer.compute_log_probs")
    LMHead.of(inner)
    setattr(inner, MARK, True)
    BaseTrainer.compute_log_probs, BaseTrainer.fit = _compute_log_probs, _fit
    return KernelPlugin("auto")(model=model, include_kernels=include_kernels)


def _fit(self: Any) -> None:
    if getattr(causal_lm(self.model), MARK, False) and not isinstance(self, SFTTrainer):
        raise ConfigError(
            f"kernel_config: logitless: expected LLaMA-Factory's SFTTrainer, got {type(self).__name__}, which makes "
            "logits of its own; leave the kernel out"
        )
    fit(self)


def _compute_log_probs(self: Any, model: nn.Module, batch: Any) -> Tensor:
    """The log-probs (B, L - 1) of each token but the first, 0 where ignored, as LLaMA-Factory's own."""
    if not getattr(causal_lm(model), MARK, False):
        return compute_log_probs(self, model, batch)
    inputs = {k: v.to(self.device, non_blocking=True) for k, v in batch.items() if isinstance(v, Tensor)}
    targets = F.pad(inputs.pop("labels"), (0, 1), value=-100)[..., 1:]

    def end(inner: Any, hidden: Tensor) -> Tensor:
        return through_head(inner, lambda head, h, y: token_stats(h, head, y).logprob, hidden, targets)

    return forward_with(model, inputs, end)[..., :-1]


if __name__ == "__main__":
    run_sft()
