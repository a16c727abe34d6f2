"""Positions that a GGUF file stretches, of which transformers reads nothing: as its configurations say it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .config import head_dim
from .header import ELSEWHERE, FACTORS, LLAMA3, Header, linear_scaling

if TYPE_CHECKING:
    from torch import Tensor

# What llama.cpp computes Llama 3's divisors with, beside the factor, where a model's configuration is silent.
RANGE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROUNDING = 1e-4  # relative, of divisors


def rope_parameters(path: Path, header: Header, config: Any) -> dict[str, Any]:
    """A model's rope_parameters with what a file's header and tensors say of long contexts.

    Raises ConfigError for what would be left out silently: YaRN, LongRoPE, divisors other than Llama 3's, and heads
    turned in part where the architecture's are turned as a whole.
    """
    found = copy.deepcopy(config.rope_parameters)
    far = found.get("full_attention", found)  # where layers differ, those that see all positions
    turned = header.own.get("rope.dimension_count")
    if turned and far is found and turned != round(head_dim(config) * found.get("partial_rotary_factor", 1.0)):
        raise ConfigError(
            f"--model {path}: its positions turn {turned} numbers of a head's {head_dim(config)}, those of "
            f"transformers' {config.model_type} model all of them; {ELSEWHERE}"
        )
    kind = header.own.get("rope.scaling.type", "none")
    stretched = kind != "none" or any(name in header.shapes for name in FACTORS)
    if not stretched or far["rope_type"] != "default":  # which transformers knows of the architecture
        return found
    if linear := linear_scaling(header):
        far |= linear
    elif LLAMA3 in header.shapes and far is found and (stretch := _llama3(config, _tensor(path, LLAMA3))):
        far |= stretch
    else:
        raise ConfigError(
            f"--model {path}: its positions are stretched in a way that is not read from GGUF files (rope.scaling.type "
            f"{kind}); {ELSEWHERE}"
        )
    return found


def _llama3(config: Any, divisors: Tensor) -> dict[str, Any] | None:
    """The options by which transformers divides a model's frequencies by the same numbers; None where none do."""
    import torch

    options = {"rope_type": "llama3", "factor": divisors.max().item(), **RANGE}
    plain, divided = (_frequencies(config, x) for x in ({"rope_type": "linear", "factor": 1.0}, options))
    same = divisors.shape == plain.shape and torch.allclose(plain / divided, divisors, rtol=ROUNDING)
    return options if same else None


def _frequencies(config: Any, options: dict[str, Any]) -> Tensor:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = copy.deepcopy(config)
    given.rope_parameters = {**config.rope_parameters, **options}
    return ROPE_INIT_FUNCTIONS[options["rope_type"]](given, torch.device("cpu"))[0]


def _tensor(path: Path, name: str) -> Tensor:
    import torch
    from gguf import GGUFReader

    (found,) = (tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    return torch.from_numpy(found.data.copy())
