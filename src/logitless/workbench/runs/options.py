"""What the options of every run share, and how they are read from files (no torch import)."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from ...errors import OptionError
from ...units import parse_bytes

DEFAULT_MODEL = "runs/tiny/model"  # what `logitless train` writes without options


# What a resumed run may change; the rest decides what the weights and the data order mean.
RESUMABLE = {
    "max_steps", "loss", "memory_budget", "device", "gradient_checkpointing", "offload_activations", "mlp_tiles",
    "rank_timeout", "report_to", "sharding", "tensor_parallel", "context_parallel",
}  # fmt: skip


INVOCATION = {"output_dir", "resume", "json", "config"}


Options = TypeVar("Options", bound="RunOptions")


@dataclass(frozen=True)
class RunOptions:
    """What the options of every run share; those that are not described here are by each command, as it uses them."""

    model: str = ""
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    max_steps: int = 1
    learning_rate: float | None = None
    lora_rank: int = 0
    memory_budget: str = "256MiB"
    """What slices of the logits may take."""
    seed: int = 0
    """Of everything random: new weights, the order of the data, sampling."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights. auto: the checkpoint's own, float32 from scratch."""
    device: str = "auto"
    """auto, cpu or cuda."""
    output_dir: Path | None = None
    """Where everything is written. Default: the first free runs/NAME, runs/NAME-2, ..., of the model or the method."""
    resume: Path | None = None
    """Continue the run in this directory from its last whole checkpoint, with the options it was started with."""
    json: Path | None = None
    """Write the summary as JSON to this file (- for standard output)."""
    config: Path | None = None
    """Read options from this YAML or TOML file; the command line overrides them."""

    @property
    def context_length(self) -> int:
        """Tokens of a sequence."""
        raise NotImplementedError

    attention = "auto"  # how the model's body is computed: options of `train` alone
    mlp_tiles = 1
    offload_activations = False
    rope_scaling = ""

    def defaults(self) -> Self:
        """What options are where they are not given; they may depend on those that are."""
        return type(self)()

    @property
    def memory_budget_bytes(self) -> int:
        return parse_bytes(self.memory_budget, "--memory-budget")

    def to_dict(self) -> dict[str, Any]:
        """The fields that say what the run is, as JSON values; not where it lies or what one invocation asked for."""
        return {name: getattr(self, name) for name in fields_of(self) if name not in INVOCATION}

    def check_shared(self, *at_least_one: str) -> None:
        """OptionError for the first of the shared values without a meaning, and of the counts that are named."""
        for name in (*at_least_one, "batch_size", "gradient_accumulation_steps", "max_steps"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(self.lora_rank >= 0, "lora_rank", "0 or more", self.lora_rank)
        require(0 <= self.seed < 2**32, "seed", "in 0..2^32-1", self.seed)
        rate = self.learning_rate
        require(rate is None or (math.isfinite(rate) and rate > 0), "learning_rate", "positive", rate)
        require(self.device in ("auto", "cpu", "cuda"), "device", "auto, cpu or cuda", self.device)
        require(self.model != "", "model", "a name or a path", self.model)
        self.memory_budget_bytes  # noqa: B018 - raises OptionError
        if self.resume is not None and self.output_dir not in (None, self.resume):
            raise OptionError(f"--resume {self.resume} goes on writing there: leave out --output-dir")


def fields_of(options: Any) -> dict[str, str]:
    """The fields of an options dataclass with their types, as text."""
    return {f.name: str(f.type) for f in fields(options)}


def require(holds: bool, name: str, expected: str, got: Any) -> None:
    if not holds:
        raise OptionError(f"--{name.replace('_', '-')} must be {expected}, got {got}")


def from_dict(values: Any, where: str, base: Options) -> Options:
    """`base` with the fields of a mapping; OptionError names an unknown or mistyped one."""
    if not isinstance(values, dict):
        raise OptionError(f"{where}: expected a table of options, got {type(values).__name__}")
    known = {name: kind for name, kind in fields_of(base).items() if name != "config"}
    new: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise OptionError(f"{where}: unknown option {key!r}; options are {', '.join(known)}")
        new[name] = _coerce(value, known[name], f"{where}: {key}")
    return dataclasses.replace(base, **new)


def _coerce(value: Any, kind: str, where: str) -> Any:
    """A value of a file as the field's type; YAML reads 1e-4 as text and 256 as a number."""
    wanted = kind.removesuffix(" | None")
    if value is None and wanted != kind:
        return None
    if wanted.startswith("Literal"):
        if value in _choices(wanted):
            return value
        raise OptionError(f"{where} must be one of {', '.join(_choices(wanted))}, got {value!r}")
    if isinstance(value, bool) == (wanted == "bool") and isinstance(value, (bool, int, float, str)):
        with suppress(ValueError, OverflowError):
            number = _CONVERT[wanted](value)
            if not isinstance(value, float) or wanted not in ("int", "Path") or number == value:
                return number
    raise OptionError(f"{where} must be of type {wanted}, got {value!r}")


_CONVERT: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float, "str": str, "Path": Path}


def _choices(literal: str) -> list[str]:
    return [part.strip(" \"'") for part in literal[len("Literal[") : -1].split(",")]


def read_file(path: Path, base: Options) -> Options:
    """The options of a YAML, TOML or JSON file over `base`; OptionError when it cannot be read."""
    return from_dict(read_table(path) or {}, str(path), base)


def read_table(path: Path) -> Any:
    """What a YAML, TOML or JSON file says; OptionError when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"cannot read --config {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}"
        ) from None
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".json", ".yaml", ".yml"):
        raise OptionError(f"--config {path}: expected a .yaml, .toml or .json file")
    try:
        return _parse(text, suffix)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise OptionError(f"--config {path}: {error}") from None


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionError(f"not YAML: {' '.join(str(error).split())}") from None


SMALL_MODEL = "runs/small/model"  # trained first where it does not exist
