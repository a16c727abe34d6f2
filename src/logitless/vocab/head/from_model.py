"""`LMHead.of`: finding a model's output head, and what its forward does to the logits afterwards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import nn

from ...errors import ConfigError
from .peft import WRAPPERS, class_of, parts_of, unwrapped

MULTIPLIES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVIDES = ("logits_scaling",)
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
TRIMS = "unpadded_vocab_size"  # the rows that are left where a model cuts its padding off
# Where models keep such a number that their forward does not read from their configuration, under its name there.
KEPT = {
    "logit_scale": "logit_scale",
    "base_model.lm_head_multiplier": "lm_head_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_softcap.softcap": "final_logit_softcapping",
}
# Models by type. Some have a transform in their configuration that their forward leaves out, or applies before the
# head (MiniCPM3) ...
LEAVES_OUT = frozenset({"mpt", "minicpm3", "gemma3", "aya_vision", "cohere2_vision"})
# ... of those around a text model, these apply the text model's ...
APPLIES_TEXT = frozenset(
    {
        "cohere_compass", "diffusion_gemma", "gemma3n", "gemma4", "gemma4_unified", "granite4_vision",
        "granite_docling", "hyperclovax_vision_v2", "inkling_mm_model", "inkling2", "inkling2_loop", "mistral_large4",
        "muse_glimmer", "muse_spark", "paligemma",
    }
)  # fmt: skip
# ... and some do what no head here does.
REFUSED = {
    "chameleon": "masks the logits of image tokens",
    "dory": "scales each entry's logit by a number of its own",
    "gemma4_assistant": "has logits for some of its vocabulary only",
    "gemma4_unified_assistant": "has logits for some of its vocabulary only",
    "mobilebert": "joins two matrices into its head",
    **dict.fromkeys(("esm", "luke", "lxmert", "bridgetower", "perceiver"), "adds a bias that is not its head's"),
}
WITHOUT_LAYER = ("deberta", "deberta-v2")  # where their configuration says legacy=False
# Whose hooks and forwards on a head gather its weight, make, move or watch it, and leave the logits as they are.
HARMLESS = (
    "torch.distributed", "torch.nn.parallel", "torch.nn.utils", "deepspeed", "accelerate", "transformers", "trl",
    "logitless",
)  # fmt: skip
MAKES_WEIGHT = "torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm", "torch.nn.utils.prune"  # hooks that do


def parts_of_model(module: nn.Module) -> dict[str, Any]:
    """The fields of the head of a model, or of a head layer, by name; see `LMHead.of`."""
    module = unwrapped(module)
    find = getattr(module, "get_output_embeddings", None)
    if find is None:
        if not _is_layer(module):
            raise ConfigError(
                f"LMHead.of: {type(module).__name__} is no nn.Linear and has no get_output_embeddings(); "
                "pass LMHead(weight, bias)"
            )
        _prepare(module)
        weight, bias, adapters = parts_of(module)
        return {"weight": weight, "bias": bias, "adapters": adapters}
    layer = find()
    if layer is None:
        raise ConfigError(f"LMHead.of: {type(module).__name__} has no output head; load the ...ForCausalLM class")
    scale, softcap, rows = transforms_of_model(module)
    _prepare(layer)
    weight, bias, adapters = parts_of(unwrapped(layer))
    fields = {"weight": weight, "bias": bias, "adapters": adapters, "scale": scale, "softcap": softcap}
    return fields | {"vocab_size": None if rows is None or rows >= weight.shape[0] else rows}


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer or wraps one, and not a whole model."""
    return isinstance(module, nn.Linear) or hasattr(module, "base_layer") or hasattr(module, "original_module")


def _prepare(layer: nn.Module) -> None:
    """Let hooks make the layer's weight; ConfigError where others may change its logits or their gradients."""
    for part in layer.modules():
        own = _own_forward(part)
        under_way = any(_origin(forward).startswith("logitless") for forward in own)  # the layer's call: hooks have run
        for kind, what in [*_hooks(part), *(("a replaced forward", forward) for forward in own)]:
            whose = _origin(what)
            if not any(whose == known or whose.startswith(f"{known}.") for known in HARMLESS):
                raise ConfigError(
                    f"LMHead.of: the output head has {kind} of {whose}, which may change its logits or gradients; "
                    "remove it, or pass LMHead(weight, bias) and do to the hidden states what it does"
                )
        for hook in part._forward_pre_hooks.values():
            if not under_way and _origin(hook).startswith(MAKES_WEIGHT):
                hook(part, ())


def _hooks(part: nn.Module) -> list[tuple[str, Any]]:
    """What runs around a module's forward and backward, and in which place."""
    places = {
        "a forward pre-hook": part._forward_pre_hooks,
        "a forward hook": part._forward_hooks,
        "a backward pre-hook": part._backward_pre_hooks,
        "a backward hook": part._backward_hooks,
    }
    return [(place, hook) for place, hooks in places.items() for hook in hooks.values()]


def _own_forward(part: nn.Module) -> list[Any]:
    """What an instance runs in the place of its class's forward, and the classes of the hooks that accelerate runs."""
    forward = part.__dict__.get("forward")
    if forward is None or type(part).__name__ in WRAPPERS:
        return []
    if hasattr(forward, "_torchdynamo_orig_callable"):  # of torch.compile(layer.forward)
        forward = inspect.unwrap(forward)
    if getattr(forward, "__func__", None) is type(part).forward:
        return []
    hook = part.__dict__.get("_hf_hook")
    return [forward, *(type(x) for x in getattr(hook, "hooks", (hook,)) if x is not None)]


def _origin(what: Any) -> str:
    """The module that a function or class was written in."""
    while isinstance(what, functools.partial):
        what = what.func
    return getattr(what, "__module__", "") or ""


def transforms_of_model(model: Any) -> tuple[float, float | None, int | None]:
    """(scale, softcap, vocab_size) that the model's forward applies to its logits."""
    name, config = class_of(model).__name__, getattr(model, "config", None)
    if config is None:
        raise ConfigError(f"LMHead.of: {name} has no config to read softcap and scale from; pass LMHead(weight, bias)")
    return transforms_of(config, name, _kept(model))


def _kept(model: Any) -> dict[str, float]:
    """The numbers that a model keeps itself, which may have been changed since its configuration was read."""
    found = {}
    for path, name in KEPT.items():
        value = functools.reduce(lambda part, step: getattr(part, step, None), path.split("."), model)
        if isinstance(value, Real):
            found[name] = float(value)
    return found


def encodes(config: Any) -> bool:
    """Whether a configuration is an encoder-decoder's, or one that holds such a text model (InstructBLIP's T5)."""
    return getattr(config, "is_encoder_decoder", False) or getattr(_text(config), "is_encoder_decoder", False)


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def transforms_of(
    config: Any, name: str, kept: Mapping[str, float] | None = None
) -> tuple[float, float | None, int | None]:
    """(scale, softcap, vocab_size) that the forward of a model of this configuration applies to its logits.

    name: what errors call the model; kept: what it has in the place of its configuration's. Raises ConfigError.
    """
    if encodes(config):
        raise ConfigError(f"LMHead.of: {name} is an encoder-decoder; pass LMHead(weight, bias, scale)")
    text = _text(config)
    kind = getattr(config, "model_type", "")
    if kind in REFUSED:
        raise ConfigError(f"LMHead.of: {name} {REFUSED[kind]}; pass LMHead(weight, bias) if your loss does not")
    if kind in WITHOUT_LAYER and not getattr(config, "legacy", True):
        raise ConfigError(
            f"LMHead.of: {name} multiplies with its word embedding (legacy=False), expected an output head that is a "
            "layer; pass LMHead(word_embeddings.weight, bias)"
        )
    if kind in LEAVES_OUT:
        return 1.0, None, None
    scale, softcap, rows = _scale(text, kept or {}), _softcap(text, kept or {}), getattr(text, TRIMS, None)
    if text is not config and kind not in APPLIES_TEXT and (scale, softcap, rows) != (1.0, None, None):
        raise ConfigError(
            f"LMHead.of: {name} holds a text model with scale {scale}, softcap {softcap} and {rows or 'all'} rows, and "
            "whether it applies them is not known; pass LMHead(weight, bias, scale, softcap, vocab_size)"
        )
    return scale, softcap, rows


def _scale(config: Any, kept: Mapping[str, float]) -> float:
    scale = 1.0
    for name in MULTIPLIES + DIVIDES:
        value = _number(config, name, kept)
        if value is None:
            continue
        divides = name in DIVIDES and not getattr(config, "model_type", "").startswith("hyperclovax")
        scale = scale / value if divides else scale * value
    return scale


def _softcap(config: Any, kept: Mapping[str, float]) -> float | None:
    return next((c for name in SOFTCAPS if (c := _number(config, name, kept))), None)


def _number(config: Any, name: str, kept: Mapping[str, float]) -> float | None:
    """What a configuration, or the model itself, says of its logits; ConfigError where that is no number."""
    value = kept.get(name, getattr(config, name, None))
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"config.json: {name}: expected a number, got {value!r}") from None
