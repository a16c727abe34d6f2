"""Options: what commands share, each declared once; those of every run; and how files say them (no torch import)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from ...algebra.options import MOST_FLOAT
from ...errors import OptionError, in_one_line
from ...units import parse_bytes

DEFAULT_MODEL = "runs/tiny/model"  # what `logitless train` writes without options
SMALL_MODEL = "runs/small/model"  # trained first where it does not exist
MEMORY_BUDGET = "256MiB"
LEAST_BUDGET = 1000  # bytes: from far smaller slices no run would ever end
MOST = 2**31  # of tokens, steps, entries


@dataclass(frozen=True)
class Option:
    """What all commands with an option say of it: its help, and a check that raises OptionError (name, value)."""

    help: str = ""
    check: Callable[[str, Any], object] | None = None
    required: bool = False  # so the help says; the command says what it expected


def require(holds: bool, name: str, expected: str, got: Any) -> None:
    """OptionError unless `holds`."""
    if not holds:
        raise OptionError(f"--{name.replace('_', '-')} must be {expected}, got {got}")


def check_values(options: Any) -> None:
    """OptionError for the first value of an options dataclass that its `Option` refuses."""
    for name, kind in get_type_hints(type(options), include_extras=True).items():
        for option in getattr(kind, "__metadata__", ()):
            if isinstance(option, Option) and option.check is not None:
                option.check(name, getattr(options, name))


def check_given(kind: type, name: str, value: Any, said: str) -> None:
    """OptionError for an empty text where that means nothing: of it a path is the current folder, and data no data."""
    if value == "" and getattr(kind, name, "") not in ("", ()):
        raise OptionError(f"{said} is empty: give a value, or leave it out")


def at_least(least: int) -> Callable[[str, Any], None]:
    """The check of a whole number, which what is computed from it must not overflow."""
    expected = "0 or more" if least == 0 else f"at least {least}"

    def check(name: str, value: int) -> None:
        require(value >= least, name, expected, value)
        require(value < MOST, name, "less than 2^31", value)

    return check


def _check_name(name: str, value: str) -> None:
    require(value != "", name, "a name or a path", value)


def _check_device(name: str, value: str) -> None:
    require(value in ("auto", "cpu", "cuda"), name, "auto, cpu or cuda", value)


def budget_bytes(text: str, option: str = "--memory-budget") -> int:
    """What logits may take in bytes; OptionError for a size without a meaning, such as 10 for 10GB."""
    return parse_bytes(text, option, least=LEAST_BUDGET)


def budget_bytes_on(device: str, text: str) -> int:
    """The same on this --device, of which auto is the library's default there."""
    if text != "auto":
        return budget_bytes(text)
    from .device import budget_on  # which asks torch

    return budget_on(device)


# The options that commands share; a command gives its default, and where one of these says no help, that too.
Count = Annotated[int, Option(check=at_least(1))]
ModelName = Annotated[str, Option(check=_check_name)]
TrainedModel = Annotated[
    str,
    Option(
        "A local transformers directory, a hub id (owner/name), a GGUF file, or smollm2, from a package. "
        "The default is trained first where it does not exist.",
        _check_name,
    ),
]
KnownModel = Annotated[
    str,
    Option(
        "A preset such as qwen3-4b, smollm2, a config.json, a model directory, a GGUF file, or a hub id (owner/name) "
        "in the local cache."
    ),
]
LoraRank = Annotated[
    int,
    Option(
        "Train rank-r adapters (alpha 2r) on every linear layer but the head, and freeze the rest. "
        "0: train everything.",
        at_least(0),
    ),
]
Checkpointing = Annotated[bool, Option("Recompute each layer in backward instead of keeping its activations.")]
Offloading = Annotated[bool, Option("Keep what --gradient-checkpointing keeps in the host's memory.")]
MlpTiles = Annotated[
    int,
    Option(
        "Compute each MLP in so many pieces of the sequence, again in backward: the same numbers in less memory.",
        at_least(1),
    ),
]
PlannedBudget = Annotated[str, Option("What slices of the logits may take.", lambda name, text: budget_bytes(text))]
MemoryBudget = Annotated[
    str,
    Option(
        "What slices of the logits may take. auto: 256 MiB; on a GPU a 64th of its memory, 256 MiB to 1 GiB.",
        lambda name, text: text == "auto" or budget_bytes(text),
    ),
]
Keep = Annotated[int, Option("How many of the best entries of each distribution to keep.", at_least(0))]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"], Option("Of the weights. auto: the checkpoint's own; new ones are float32.")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], Option("Where to compute. auto: a GPU if torch sees one.", _check_device)
]
ReportTo = Annotated[
    Literal["none", "trackio", "tensorboard", "wandb"], Option("Where metrics go beside metrics.jsonl.")
]
Units = Annotated[Literal["GiB", "GB"], Option("GiB are 2^30 bytes, GB are 10^9.")]
JsonFile = Annotated[Path | None, Option("Write the results as JSON to this file (- for standard output).")]

# What a resumed run may change; the rest decides what the weights and the data order mean.
RESUMABLE = {
    "max_steps",
    "loss",
    "loss_threshold",
    "memory_budget",
    "device",
    "gradient_checkpointing",
    "offload_activations",
    "mlp_tiles",
    "rank_timeout",
    "report_to",
    "sharding",
    "tensor_parallel",
    "context_parallel",
}
INVOCATION = {
    "output_dir",
    "resume",
    "json",
    "config",
    "trust_config",
}  # what one invocation asks for, which is not what the run is

Options = TypeVar("Options", bound="RunOptions")


@dataclass(frozen=True)
class RunOptions:
    """The options of every run; those without a description are described by each command, as it uses them."""

    model: ModelName = ""
    data: str | None = None
    batch_size: Count = 1
    gradient_accumulation_steps: Count = 1
    """Forward passes per optimizer step."""
    gradient_checkpointing: Checkpointing = False
    max_steps: Count = 1
    """Optimizer steps."""
    learning_rate: float | None = None
    lora_rank: LoraRank = 0
    memory_budget: MemoryBudget = "auto"
    seed: int = 0
    """Of everything random: new weights, the order of the data, sampling."""
    dtype: Dtype = "auto"
    device: Device = "auto"
    output_dir: Path | None = None
    """Where everything is written. Default: the first free runs/NAME, runs/NAME-2, ..., of the model or the method."""
    resume: Path | None = None
    """Continue the run in this directory from its last whole checkpoint, with the options it was started with."""
    json: JsonFile = None
    config: Path | None = None
    """Read options from this YAML or TOML file; the command line overrides them."""
    trust_config: bool = False
    """Also run code of the modules that --config, or the run that --resume goes on with, names as its rewards."""

    length_options = "--prompt-length and --completion-length, together"  # that `context_length` comes from
    whole_weights = "--dtype float32"  # what keeps small updates, which weights of bfloat16 lose

    # How the model's body is computed: options of `train` alone.
    attention = "auto"
    mlp_tiles = 1
    offload_activations = False
    mixed_precision = "no"

    @property
    def rope_scaling(self) -> str | None:
        """None where the command has no such option."""
        return None

    @property
    def context_length(self) -> int:
        """Tokens of a sequence."""
        raise NotImplementedError

    def defaults(self) -> Self:
        """What options are where they are not given; they may depend on those that are."""
        return type(self)()

    def inputs(self) -> dict[str, Any]:
        """The paths that are read, by the names of their options; None where they are not given."""
        names = ("model", "reward_model", "data", "teacher", "teacher_ids", "config")
        return {name: getattr(self, name, None) for name in names}

    @property
    def data_name(self) -> str:
        """The text, as a summary has it."""
        return "stdlib" if self.data is None else self.data

    @property
    def data_said(self) -> str:
        """The text, as a message has it."""
        return "the standard library (no --data)" if self.data is None else f"--data {self.data}"

    @property
    def memory_budget_bytes(self) -> int:
        return budget_bytes_on(self.device, self.memory_budget)

    def to_dict(self) -> dict[str, Any]:
        """The fields that say what the run is, as JSON values; not where it lies or what one invocation asked for."""
        return {name: getattr(self, name) for name in kinds_of(self) if name not in INVOCATION}

    def value_of(self, name: str) -> Any:
        """What the run goes by where an option is not given, as far as its others say it; for people to read."""
        value = getattr(self, name)
        if value == "":
            return "none"
        return "its default" if value is None else value

    def check_shared(self) -> None:
        """OptionError for the first value without a meaning, of the options of every run and of those with a check."""
        check_values(self)
        require(0 <= self.seed < 2**32, "seed", "in 0..2^32-1", self.seed)
        rate = self.learning_rate
        require(rate is None or 0 < rate <= MOST_FLOAT, "learning_rate", "positive, and finite in float32", rate)
        if self.resume is not None and self.output_dir not in (None, self.resume):
            raise OptionError(f"--resume {self.resume} goes on writing there: leave out --output-dir")


def check_trusted(options: RunOptions, on_the_line: RunOptions) -> None:
    """OptionError where a file, --config or a resumed run's, and not the command line, names code that would run."""
    if on_the_line.trust_config:
        return
    file = f"--resume {options.resume}" if options.config is None else f"--config {options.config}"
    for name, value in code_named(options.to_dict()).items():
        if value != getattr(on_the_line, name):
            raise OptionError(
                f"{file}: its {name} {value} would import a module and run its code: give "
                f"--{name.replace('_', '-')} on the command line, or --trust-config"
            )


def code_named(options: Mapping[str, Any]) -> dict[str, str]:
    """Those of a run's options that name a module whose code runs."""
    named = {name: options.get(name) for name in ("rewards", "token_reward")}
    return {name: value for name, value in named.items() if isinstance(value, str) and ":" in value}


def kinds_of(options: Any) -> dict[str, Any]:
    """The fields of an options dataclass with their types."""
    kinds = get_type_hints(type(options))
    return {field.name: kinds[field.name] for field in fields(options)}


def from_dict(values: Any, where: str, base: Options) -> Options:
    """`base` with the fields of a mapping; OptionError names an unknown or mistyped one."""
    if not isinstance(values, dict):
        raise OptionError(f"{where}: expected a table of options, got {type(values).__name__}")
    known = {name: kind for name, kind in kinds_of(base).items() if name not in ("config", "trust_config")}
    new: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_") if isinstance(key, str) else ""
        if name not in known:
            raise OptionError(f"{where}: unknown option {short(key)}; options are {', '.join(known)}")
        if name in new:
            raise OptionError(
                f"{where}: {name} is given twice, as {name} and as {name.replace('_', '-')}: give it once"
            )
        check_given(type(base), name, value, f"{where}: {key}")
        new[name] = _coerce(value, known[name], f"{where}: {key}")
    return dataclasses.replace(base, **new)


def _coerce(value: Any, kind: Any, where: str) -> Any:
    """A value of a file as the field's type; YAML reads 1e-4 as text and 256 as a number."""
    parts = get_args(kind)  # of a Literal or a union
    if get_origin(kind) is Literal:
        if value is False and "no" in parts:  # which YAML reads so
            return "no"
        if value in parts:
            return value
        raise OptionError(f"{where} must be one of {', '.join(parts)}, got {short(value)}")
    if value is None and NoneType in parts:
        return None
    wanted = next((part for part in parts if part is not NoneType), kind)
    if isinstance(value, str) and not _is_name(value):
        raise OptionError(f"{where} must be without NUL and halves of characters, got {short(value)}")
    if isinstance(value, bool) == (wanted is bool) and isinstance(value, (bool, int, float, str)):
        with suppress(ValueError, OverflowError, TypeError):
            str(value)  # ValueError for a number of more digits than Python writes
            made = wanted(value)
            if not isinstance(value, float) or _stays(value, made):
                return made
    raise OptionError(f"{where} must be of type {wanted.__name__}, got {short(value)}")


def _is_name(text: str) -> bool:
    """Whether a file could be called so, as those of other bytes than UTF-8's can."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _stays(value: float, made: Any) -> bool:
    """Whether a number is what was made of it: not where digits are lost, or no text means it."""
    return math.isfinite(value) if isinstance(made, str) else isinstance(made, float) or made == value


class _Shortest(reprlib.Repr):
    """Numbers that Python writes no digits of are named: what reprlib does with them depends on Python's version."""

    def repr_int(self, x: int, level: int) -> str:
        try:
            str(x)
        except ValueError:
            return "a number of too many digits"
        return super().repr_int(x, level)


def short(value: Any) -> str:
    """A value of a file as an error says it, however long or deep it is."""
    shortest = _Shortest()
    shortest.maxstring, shortest.maxlevel = 80, 2
    return shortest.repr(value)


def read_file(path: Path, base: Options) -> Options:
    """The options of a YAML, TOML or JSON file over `base`; OptionError when it cannot be read."""
    table = read_table(path)
    return from_dict({} if table is None else table, str(path), base)


def read_table(path: Path) -> Any:
    """What a YAML, TOML or JSON file says; OptionError when it cannot be read."""
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".json", ".yaml", ".yml"):
        raise OptionError(f"--config {path}: expected a .yaml, .toml or .json file")
    if path.exists() and not path.is_file():
        raise OptionError(f"--config {path}: expected a file, got a folder, a device or a pipe")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"cannot read --config {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}"
        ) from None
    try:
        return _parse(text, suffix)
    except RecursionError:
        raise OptionError(f"--config {path}: nested too deeply") from None
    except ValueError as error:  # OptionError, and what json and tomllib raise, numbers of too many digits included
        raise OptionError(f"--config {path}: {error}") from None


def _each_once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping of names that stand once each, as TOML has it too; OptionError for others."""
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(f"{short(twice)} is given twice: give it once")
    return dict(pairs)


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text, object_pairs_hook=_each_once)
    import yaml

    try:
        top, found = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date without a meaning
        raise OptionError(f"not YAML: {in_one_line(error, 500)}") from None
    except (KeyError, IndexError, AttributeError, TypeError):  # of PyYAML's own, such as of `!!bool x`
        raise OptionError("not YAML: a value that its tag does not fit") from None
    if isinstance(top, yaml.MappingNode):
        _each_once([(name.value, name) for name, _ in top.value])
    return found
