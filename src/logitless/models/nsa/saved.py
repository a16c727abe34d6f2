"""Models that were saved with native sparse attention, whose parameters transformers alone has no place for."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ...errors import ConfigError, in_one_line
from .layers import attach

WHERE = ("revision", "cache_dir", "token", "local_files_only")  # options of from_pretrained and of the hub


def load(name: str | Path, **options: Any) -> Any:
    """The causal language model of a directory or a hub id that was saved with nsa.

    transformers alone refuses its config.json, which names an attention that it does not know. options: those of
    `AutoModelForCausalLM.from_pretrained`. Raises ConfigError.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa", **options)
    return load_parameters(model, name, **options)


def load_parameters(model: Any, name: str | Path, **options: Any) -> Any:
    """`attach` for a checkpoint saved with nsa: reads what `from_pretrained` had no place for. Raises ConfigError.

    options: those that `from_pretrained` had, of which some say where the weights lie.
    """
    attach(model)
    wanted = {name for name in model.state_dict() if ".nsa." in name}
    found: dict[str, Tensor] = {}
    for path in sorted(_directory(name, **options).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys() if key in wanted}  # noqa: SIM118
    if missing := wanted - found.keys():
        raise ConfigError(f"{name}: its config.json names nsa, but its weights have no {min(missing)}")
    model.load_state_dict(found, strict=False)
    return model


def _directory(name: str | Path, subfolder: str = "", **options: Any) -> Path:
    """Where the weights of a directory or of a hub id lie."""
    from huggingface_hub import snapshot_download

    if Path(name).is_dir():
        return Path(name, subfolder)
    where = {option: options[option] for option in WHERE if option in options}
    wanted = PurePosixPath(subfolder, "*.safetensors").as_posix()
    try:
        return Path(snapshot_download(str(name), allow_patterns=wanted, **where), subfolder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: its weights cannot be had: {in_one_line(error)}") from None
