"""The adapters of an output head, known by what PEFT's layers look like: PEFT itself is not imported."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from ...errors import ConfigError
from .low_rank import LowRank

Parts = tuple[Tensor, Tensor | None, tuple[LowRank, ...]]  # weight, bias, adapters
LORA = (
    "peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.ParamWrapper", "peft.tuners.lora.bnb.Linear4bit",
    "peft.tuners.lora.torchao.TorchaoLoraLinear",
)  # fmt: skip
FOUR_BIT = ("Linear4bit", "LinearNF4", "LinearFP4")  # bitsandbytes' layers of a weight that `packed` knows
SAVED = "peft.utils.other.ModulesToSaveWrapper"
SHARDING = ("FSDPModule", "ReplicateModule")  # mixed into a module's class in place, by fully_shard and replicate
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile's
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "PeftMixedModel": "base_model",  # which has no get_base_model ...
    "MixedModel": "model",  # ... and calls this
}


def unwrapped(module: Any) -> nn.Module:
    """The module under DDP, DeepSpeed, FSDP1, torch.compile, activation checkpointing and a PeftModel."""
    while True:
        kind = type(module).__name__
        if kind in WRAPPERS:
            module = getattr(module, WRAPPERS[kind])
        elif hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
            module = module.get_base_model()
        else:
            return module


def class_of(module: nn.Module) -> type:
    """The module's class as its author wrote it."""
    kind = type(module)
    mixed_in = len(kind.__bases__) == 2 and kind.__bases__[0].__name__ in SHARDING
    return kind.__bases__[1] if mixed_in else kind


def parts_of(layer: nn.Module) -> Parts:
    """The weight, bias and adapters that a head layer multiplies with, as things stand now."""
    kind = class_of(layer)
    if kind is nn.Linear or (kind.__name__ in FOUR_BIT and kind.__module__.startswith("bitsandbytes.")):
        return layer.weight, layer.bias, ()  # type: ignore[return-value]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == SAVED:
        return parts_of(_saved(layer))
    if name in LORA:
        return _lora(layer)
    _refuse(layer, f"the output head is a {name.removeprefix('torch.nn.')}, not a plain nn.Linear or a LoRA of one")


def _saved(wrapper: Any) -> nn.Module:
    """What a `modules_to_save` wrapper calls: the active adapter's copy, or the original."""
    active = wrapper.active_adapters
    if wrapper.disable_adapters or not active or any(name not in wrapper.modules_to_save for name in active):
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def _lora(layer: Any) -> Parts:
    """PEFT's LoRA layer: its base layer, and the factors of every active adapter unless merged or disabled."""
    if layer.disable_adapters and layer.merged:
        layer.unmerge()  # as its own forward does
    weight, bias, adapters = parts_of(layer.base_layer)
    if layer.disable_adapters or layer.merged:
        return weight, bias, adapters
    if getattr(layer, "parameter_name", "weight") != "weight":
        _refuse(layer, f"a LoRA targets the output head's {layer.parameter_name}, not its weight")
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        adapter, extra = _factors(layer, name)
        adapters += (adapter,)
        if extra is not None:
            bias = extra if bias is None else bias + extra
    return weight, bias, adapters


def _factors(layer: Any, name: str) -> tuple[LowRank, Tensor | None]:
    """One adapter, and what it adds to the bias."""
    variant = layer.lora_variant.get(name)
    if variant is not None:
        _refuse(layer, f"the output head's adapter {name!r} is a {type(variant).__name__}, not plain LoRA")
    a, b, drop = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    for part in (a, b):
        if class_of(part) is not nn.Linear:
            _refuse(layer, f"the output head's adapter {name!r} holds a {type(part).__name__}, not an nn.Linear")
    if type(drop) not in (nn.Dropout, nn.Identity):
        _refuse(layer, f"the output head's adapter {name!r} drops by a {type(drop).__name__}, not by nn.Dropout")
    p = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
    scaling = layer.scaling[name]
    return LowRank(a.weight, b.weight, scaling, p), None if b.bias is None else b.bias * scaling


def _refuse(layer: nn.Module, found: str) -> NoReturn:
    raise ConfigError(f"LMHead.of: {found}; merge its adapter or dequantise it, then pass LMHead(weight, bias)")
