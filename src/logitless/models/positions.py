"""How far a model's positions reach, and rotary embeddings scaled to reach further (no torch import)."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigError, OptionError

SCALINGS = ("linear", "dynamic", "yarn")
STATED = ("default", "llama3", "longrope", "proportional")  # max_position_embeddings is what they reach already


def reach(config: Any) -> int | None:
    """The longest context that a transformers configuration stands for, in tokens; None where it does not say.

    linear and dynamic scaling stretch max_position_embeddings by their factor, yarn the positions before scaling;
    llama3 and longrope are stretched already, and so is linear where layers differ, as Gemma 3's do. Other models that
    were published with linear scaling may count it in max_position_embeddings too: of them this is too much. Every kind
    of layer counts, but those with a sliding window. Raises ConfigError where it says what is no length.
    """
    longest, parameters = getattr(config.get_text_config(), "max_position_embeddings", None), _parameters(config)
    if longest is None:
        return None
    try:
        found = reached(longest, parameters)
    except (TypeError, ValueError, OverflowError, AttributeError):
        found = 0
    if found < 1:
        raise ConfigError(
            "config.json: expected a positive max_position_embeddings, and numbers in rope_parameters, got "
            f"{longest} and {parameters}"
        )
    return found


def reached(longest: int, parameters: dict[str, Any] | None) -> int:
    """`reach` of max_position_embeddings and rope_parameters."""
    stated = _stated(parameters)
    return min(
        (longest if _kind(one) in stated else _reach(one, longest) for one in _rotary(parameters)), default=longest
    )


def plain(parameters: dict[str, Any] | None) -> bool:
    """Whether rope_parameters are of rotary embeddings that `scale` can stretch: none of them is scaled yet."""
    places = _rotary(parameters)
    return bool(places) and all(_kind(one) == "default" for one in places)


def _kind(parameters: dict[str, Any]) -> str:
    return parameters.get("rope_type", "default")


def _stated(parameters: dict[str, Any] | None) -> tuple[str, ...]:
    """The kinds of which max_position_embeddings says how far they reach."""
    by_layer = any(isinstance(value, dict) for value in (parameters or {}).values())
    return (*STATED, "linear") if by_layer else STATED


def _reach(parameters: dict[str, Any], longest: int) -> int:
    before, factor = parameters.get("original_max_position_embeddings") or longest, parameters.get("factor") or 1.0
    return max(longest, math.floor((before if _kind(parameters) == "yarn" else longest) * factor))


def _rotary(parameters: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The rotary parameters of a configuration, by kind of layer where they differ; none: positions are a table."""
    parameters = parameters or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    far = [value for key, value in parameters.items() if isinstance(value, dict) and not key.startswith("sliding")]
    return (far or nested) if nested else [parameters] if parameters else []


def _parameters(config: Any) -> dict[str, Any] | None:
    return getattr(config.get_text_config(), "rope_parameters", None)


def changes_with_length(config: Any) -> str | None:
    """The kind of a configuration's rotary embeddings whose frequencies follow the longest position of a call."""
    kinds = map(_kind, _rotary(_parameters(config)))
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)


def steady_reach(config: Any) -> int | None:
    """`reach`, of dynamic rotary embeddings as far only as they do not follow the longest text so far."""
    dynamic = changes_with_length(config) == "dynamic"
    return config.get_text_config().max_position_embeddings if dynamic else reach(config)


def check_steady(config: Any, length: int, given: str = "--context-length") -> None:
    """OptionError where rotary embeddings would follow the longest document so far, and no run be like another."""
    if changes_with_length(config) == "dynamic" and length > (longest := steady_reach(config) or length):
        raise OptionError(
            f"{given} {length}: past position {longest}, dynamic rotary embeddings follow the longest document so far, "
            "so that a resumed run has other numbers; use yarn or linear"
        )


def parse_scaling(text: str) -> tuple[str, float]:
    """ "yarn:4" -> ("yarn", 4.0). Raises OptionError."""
    kind, _, number = text.partition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if kind not in SCALINGS or not (math.isfinite(factor) and factor >= 1):
        expected = f"a kind ({', '.join(SCALINGS)}) and a factor of at least 1, such as yarn:4"
        raise OptionError(f"--rope-scaling must be {expected}, got {text!r}")
    return kind, factor


def scale(config: Any, scaling: str) -> None:
    """Writes a scaling such as "yarn:4" into a configuration's rotary parameters. Raises OptionError.

    yarn: Peng et al., arXiv 2309.00071; linear: Chen et al., arXiv 2306.15595; dynamic: NTK-aware, by the length.
    """
    kind, factor = parse_scaling(scaling)
    text = config.get_text_config()
    places = _rotary(_parameters(config))
    if not places:
        raise OptionError(f"--rope-scaling {scaling}: {text.model_type} has no rotary embeddings to scale")
    if not plain(_parameters(config)):
        found = ", ".join(sorted({parameters["rope_type"] for parameters in places}))
        raise OptionError(f"--rope-scaling {scaling}: the model's config has a scaling already ({found})")
    longest = text.max_position_embeddings
    for parameters in places:
        parameters |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = longest
    if kind == "yarn" or kind in _stated(_parameters(config)):
        text.max_position_embeddings = math.floor(longest * factor)


def check_reach(
    config: Any, context_length: int, name: str, by_option: bool = True, given: str = "--context-length"
) -> None:
    """OptionError when a context is longer than the model's positions; it says which scaling would do.

    by_option: whether the caller has --rope-scaling; otherwise the model's own config.json is the place to scale.
    given: the options whose length it is.
    """
    longest = reach(config)
    if longest is None or context_length <= longest:
        return
    parameters, factor = _parameters(config), math.ceil(context_length / longest)
    if plain(parameters) and not by_option:
        remedy = f'"rope_type": "yarn", "factor": {factor} in the rope_parameters of its config.json stretches them'
    elif plain(parameters):
        remedy = f"--rope-scaling yarn:{factor} stretches them (another kind: linear)"
    elif kinds := set(map(_kind, _rotary(parameters))).intersection(_stated(parameters)[1:]):
        remedy = (
            f"no factor stretches {min(kinds)} positions further: use a shorter context, or the "
            "max_position_embeddings in its config.json that they are known to reach"
        )
    elif _rotary(parameters):
        remedy = f"raise the factor of its config's rope_parameters {factor} times"
    else:
        remedy = "they are a table of weights, which cannot be stretched"
    raise OptionError(f"{given} {context_length}: {name} has positions up to {longest}; {remedy}")
