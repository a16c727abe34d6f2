"""What a body's activations cost at long contexts, and what takes them away: tiles of the MLP, offloaded inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError, OptionError
from .instances import checkpoint_layers

CHECKPOINTED = "_gradient_checkpointing_func"  # transformers' place for it, on every layer


def tile_mlp(model: nn.Module, tiles: int) -> nn.Module:
    """Every layer's MLP in `tiles` pieces of the sequence, each computed again in backward: the same numbers.

    Of the MLP's width only one piece is alive at a time, (tokens / tiles, width), forward and backward. Costs one
    more forward pass of the MLPs, and a matrix's gradient beside the one it is added to. (ALST, arXiv 2506.13996.)
    Raises OptionError below one tile, ConfigError for a model without dense MLPs or with tiles, which it leaves as it
    was.
    """
    if tiles < 1:
        raise OptionError(f"--mlp-tiles must be at least 1, got {tiles}")
    found: list[Any] = [m.mlp for m in model.modules() if isinstance(getattr(m, "mlp", None), nn.Module)]
    routed = [m for m in found if hasattr(m, "experts")]
    if not found or routed:
        what = f"layers that route ({type(routed[0]).__name__})" if routed else "no layer with an mlp"
        raise ConfigError(f"--mlp-tiles needs dense MLPs: {type(model).__name__} has {what}")
    if before := [m.tiles for m in found if isinstance(m, Tiled)]:
        raise ConfigError(f"--mlp-tiles {tiles}: {type(model).__name__} has {before[0]} already; make the model anew")
    for mlp in found if tiles > 1 else ():
        mlp.__class__ = type(type(mlp).__name__, (Tiled, type(mlp)), {"tiles": tiles})
    return model


class Tiled(nn.Module):
    """Before an MLP's own class: its forward pass, one piece of the sequence after the other."""

    tiles: int

    def forward(self, hidden: Tensor) -> Tensor:
        parts, whole = hidden.chunk(self.tiles, dim=-2), super().forward
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(whole, part, use_reentrant=False) for part in parts], dim=-2)  # pyright: ignore
        return torch.cat([whole(part) for part in parts], dim=-2)


def offload_inputs(model: nn.Module) -> nn.Module:
    """The inputs of checkpointed layers wait for backward in the host's memory, pinned where there is a GPU.

    What stays on the device does not grow with the number of layers. Costs a copy of (tokens, hidden) per layer each
    way; exact. Raises ConfigError for a model whose layers are not checkpointed.
    """
    layers: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    if not any(hasattr(layer, CHECKPOINTED) for layer in layers):
        raise ConfigError("--offload-activations needs --gradient-checkpointing: it moves what that keeps")
    for layer in layers:
        setattr(layer, CHECKPOINTED, _offloaded)
    return model


def _offloaded(run: Callable[..., Any], *inputs: Any) -> Any:
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in inputs)
    with save_on_cpu(pin_memory=on_gpu):
        return checkpoint(run, *inputs, use_reentrant=False)


def lightened(model: Any, checkpointing: bool, offload: bool, tiles: int) -> Any:
    """The model with what was asked for of checkpointed layers, offloaded inputs and a tiled MLP."""
    if checkpointing:
        checkpoint_layers(model)
    if tiles > 1:
        tile_mlp(model, tiles)
    return offload_inputs(model) if offload else model
