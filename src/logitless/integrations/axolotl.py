"""A plugin for axolotl: its fine-tuning without logits.

    plugins:
      - logitless.integrations.axolotl.LogitlessPlugin

Works with axolotl 0.19 to 0.21.
"""

# ruff: noqa: E402 - the seam is looked at before what it names is imported
# pyright: reportMissingImports=false

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel

from ..errors import ConfigError
from .seam import Seam
from .transformers.install import install
from .transformers.lm_head import STATE, causal_lm

BASE = "axolotl.integrations.base:BasePlugin"
HOST = Seam(
    "axolotl",
    ">=0.19,<0.22",
    {
        f"{BASE}.get_input_args": ("self",),
        f"{BASE}.post_model_load": ("self", "cfg", "model"),
        f"{BASE}.post_trainer_create": ("self", "cfg", "trainer"),
    },
)
HOST.require()

from axolotl.integrations.base import BasePlugin

# Settings of axolotl that replace the logitless loss, or ask for its logits.
OTHER_LOSSES = (
    "rl", "orpo_alpha", "chunked_cross_entropy", "use_eaft", "cut_cross_entropy", "liger_fused_linear_cross_entropy",
    "liger_cross_entropy", "flash_attn_cross_entropy", "kd_trainer", "reward_model", "process_reward_model", "use_dft",
    "diffusion", "diffusion_lm", "diffusion_decision",
)  # fmt: skip


class LogitlessArgs(BaseModel):
    """The plugin's options, beside axolotl's own in its YAML."""

    logitless_loss: Literal["logitless", "auto", "dense"] = "logitless"
    logitless_memory_budget: int | None = None  # bytes of slices, 256 MiB unless given, up to 1 GiB on a GPU


class LogitlessPlugin(BasePlugin):
    """Installs the logitless loss on the model that axolotl loaded, adapters and quantised weights included.

    Raises ConfigError where the configuration asks for another loss, and what `logitless.install` raises.
    """

    def get_input_args(self) -> str:
        return f"{__name__}.{LogitlessArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        asked = [name for name in OTHER_LOSSES if cfg.get(name)]
        if asked:
            raise ConfigError(
                f"LogitlessPlugin: expected axolotl's cross-entropy, got {', '.join(asked)}; leave one of the two out"
            )
        install(model, loss=cfg.logitless_loss or "logitless", memory_budget=cfg.logitless_memory_budget)
        # axolotl counts no tokens: its mean over none is NaN; the parts that ranks have it weighs by theirs
        causal_lm(model).__dict__[STATE].empty = 0.0 if (cfg.context_parallel_size or 1) > 1 else math.nan

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Streams the trainer's label smoothing too, and gives its evaluation the logits that it asks for."""
        if getattr(trainer, "compute_loss_func", None) is not None:  # a trainer then asks its model for logits
            raise ConfigError(
                "LogitlessPlugin: expected axolotl's cross-entropy, got a compute_loss_func; leave it out"
            )
        loss, budget = cfg.logitless_loss or "logitless", cfg.logitless_memory_budget
        install(trainer, loss=loss, memory_budget=budget, metrics=False)
