"""The model of a run: a preset, a config.json, a directory, a package's, a GGUF file or a hub id -> a causal LM."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...errors import ConfigError, LogitlessError, OptionError, in_one_line
from ...models.instances import any_layer, config_of, sees_ahead, with_adapters
from ...models.nsa.options import options_of, saved_with_nsa
from ...models.positions import check_reach, reach, scale
from ...models.presets import PRESETS, check_known, preset
from ...models.pretrained import PACKAGES
from ...printable import few
from ..common.files import parsed
from ..common.options import RunOptions
from .converted import check_packed, directory_of, is_packed
from .tokenizer import TextTokenizer, pretrained, tekken

WHOLE = ("I", "U", "BOOL")  # with which safetensors' names of dtypes begin that are not of floating point
DROPOUT = ("dropout", "pdrop")  # with which configurations' names of probabilities end
FROM_SCRATCH_RATE, PRETRAINED_RATE, LORA_RATE = 3e-3, 2e-5, 2e-4


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: its configuration, and the place of its weights (None: from scratch)."""

    name: str  # as --model says it
    config: Any  # a transformers PreTrainedConfig
    weights: str | None
    tokenizer: str | None  # where its tokenizer lies; None: Tekken

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    def default_rate(self, lora_rank: int) -> float:
        if lora_rank:
            return LORA_RATE
        return FROM_SCRATCH_RATE if self.weights is None else PRETRAINED_RATE


@contextmanager
def said_of(option: str) -> Iterator[None]:
    """Where a model is that of another option than --model, a ConfigError names that one."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("--model", f"--{option}", 1)) from None


def check_model(name: str, wish: str | None = None) -> None:
    """ConfigError for a --model that can be seen to lead nowhere without transformers; a hub id may lead anywhere.

    wish: what needs weights; None where a configuration is enough.
    """
    if name in PRESETS or name in PACKAGES:
        check_known(name)
    if is_packed(name):
        return check_packed(name)
    path = Path(name)
    known = name in PRESETS or path.exists() or _is_hub_id(name)
    here = path.exists() and name not in PRESETS
    if here and path.is_dir():
        _check_directory(path, wish)
    elif here and not path.is_file():
        raise ConfigError(f"--model {name}: expected a file or a folder, got a device or a pipe")
    elif wish is not None and (not known or name in PRESETS or here):
        expected = f"a directory with weights to {wish}, or a hub id (owner/name)"
        got = "a configuration without weights" if known else "nothing of this name"
        near = get_close_matches(name.lower(), PACKAGES, n=1)
        others = f"logitless train writes such a directory; {', '.join(PACKAGES)} and GGUF files have weights, too"
        others = f"did you mean {near[0]}?" if near else others
        raise ConfigError(f"--model {name}: expected {expected}, got {got}; {others}")
    elif here:
        _read_json(path)
    elif not known:
        preset(name)  # raises with the nearest names


def check_classifier(name: str) -> None:
    """`check_model` of what gives sequences labels; ConfigError for all but directories and hub ids."""
    if is_packed(name) or not (Path(name).is_dir() or _is_hub_id(name)):
        got = "a language model" if name in PRESETS or is_packed(name) else "neither"
        raise ConfigError(
            f"--model {name}: expected a directory with a sequence classifier, or a hub id (owner/name), got {got}"
        )
    check_model(name, "reward with")


def resolve(name: str) -> ModelSource:
    """The source that `--model` names; ConfigError when there is none, or when it would run code of its own."""
    check_model(name)
    path = Path(name)
    if name in PRESETS:
        return ModelSource(name, _checked(config_of(preset(name), name), name), None, None)
    if path.is_file() and not is_packed(name):
        beside = path.parent if (path.parent / "tokenizer_config.json").exists() else None
        config = _checked(config_of(_read_json(path), name), name)
        return ModelSource(name, config, None, None if beside is None else str(beside))
    place = str(directory_of(name)) if is_packed(name) else name
    return ModelSource(name, _checked(_load_config(place), name), place, place)


def resolve_trained(name: str, wish: str) -> ModelSource:
    """`resolve` of a model that has weights; ConfigError where there are none for what is wished for."""
    check_model(name, wish)
    return resolve(name)


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def _check_directory(path: Path, wish: str | None) -> None:
    if not (path / "config.json").exists():
        inside = next((x for x in (path / "model", path.parent / "model") if (x / "config.json").exists()), None)
        hint = "" if inside is None else f"; did you mean {inside}?"  # a run's directory, or a checkpoint's
        raise ConfigError(f"--model {path}: no config.json in this directory{hint}")
    if not any(path.glob("*.safetensors")):
        remedy = f"; give {path / 'config.json'} to start from scratch" if wish is None else f" to {wish}"
        raise ConfigError(f"--model {path}: no .safetensors weights{remedy}")
    for index in path.glob("*.safetensors.index.json"):
        _check_index(index)
    for weights in sorted(path.glob("*.safetensors")):
        _check_weights_file(weights)


def _check_weights_file(path: Path) -> None:
    """ConfigError for a file of weights that cannot be opened, or whose header asks for another size than it has."""
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():
        raise ConfigError(f"--model {path.parent}: {path.name}: expected a file, got a folder, a device or a pipe")
    try:
        path.open("rb").close()  # of one that is not readable, safetensors says that it is not there
        with safe_open(path, framework="np"):
            pass
    except OSError as error:
        raise ConfigError(f"--model {path.parent}: {path.name}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ConfigError(
            f"--model {path.parent}: {path.name} is cut short, or no safetensors file: copy or download it again "
            f"({in_one_line(error)})"
        ) from None


def _check_index(index: Path) -> None:
    """ConfigError unless an index names safetensors of its own directory: others would be unpickled, or from afar."""
    found = _read_json(index)
    files, metadata = (found.get(x) if isinstance(found, dict) else None for x in ("weight_map", "metadata"))
    if not isinstance(files, dict) or not isinstance(metadata, dict):
        raise ConfigError(
            f"--model {index.parent}: {index.name}: expected metadata, and a weight_map of tensors to files"
        )
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"--model {index.parent}: {index.name} names {name!r}; expected .safetensors files of this directory"
            )


def _read_json(path: Path) -> Any:
    try:
        return parsed(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path}: not a readable JSON file ({in_one_line(error, 300)})") from None


def _load_config(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # network, JSON and validation errors of several libraries
        local = "" if Path(name).exists() else "no directory of this name, and as a hub id: "
        raise ConfigError(f"--model {name}: {local}{in_one_line(error, 300)}") from None


def _checked(config: Any, name: str) -> Any:
    """The configuration; ConfigError for values of it that end in a traceback later, which transformers lets pass."""
    text = config.get_text_config()
    try:
        if not isinstance(getattr(text, "vocab_size", None), int):
            raise ConfigError(f"config.json: expected a vocab_size, and a text_config that is one, got {text!r:.80}")
        reach(config)
        options_of(config)
        for key, value in vars(text).items():
            if key.endswith(DROPOUT) and type(value) in (int, float) and not 0 <= value <= 1:
                raise ConfigError(f"config.json: {key}: expected a share, 0 to 1, got {value}")
    except LogitlessError as error:
        raise ConfigError(f"--model {name}: {error}") from None
    for part in (config, text):  # what a forward returns is for its caller to say
        part.output_attentions, part.output_hidden_states, part.return_dict = False, False, True
    return config


def load_tokenizer(source: ModelSource) -> TextTokenizer:
    """The model's tokenizer; ConfigError when one of its ids has no row in the model's vocabulary."""
    tokenizer = tekken() if source.tokenizer is None else pretrained(source.tokenizer)
    if tokenizer.size > source.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.size:,} entries, the model's vocabulary only {source.vocab_size:,}: "
            "use a model with its own tokenizer beside its config.json, or a larger vocab_size"
        )
    return tokenizer


def reaching(source: ModelSource, length: int, scaling: str | None = None, given: str = "--context-length") -> Any:
    """The source's configuration, for sequences of `length` tokens; OptionError when its positions end before.

    scaling: such as yarn:4, "" for none; None where the command has no --rope-scaling, which an error then leaves out.
    given: the options whose length it is.
    """
    wanted = deepcopy(source.config)
    if scaling:
        scale(wanted, scaling)
    check_reach(wanted, length, source.name, by_option=scaling is not None, given=given)
    return wanted


def load_model(
    source: ModelSource,
    *,
    dtype: str = "auto",
    attention: str = "auto",
    length: int = 1,
    scaling: str | None = None,
    given: str = "--context-length",
    seed: int = 0,
) -> Any:
    """The transformers model on the CPU, for sequences of `length` tokens; new weights are of the seed.

    dtype, attention: as --dtype and --attention say it; scaling, given: as `reaching` takes them. Raises
    LogitlessError, also for a checkpoint that lacks weights of the model, or has more of its layers.
    """
    from transformers import set_seed

    wanted = reaching(source, length, scaling, given)
    set_seed(seed)
    model, unused = _transformers_model(source, wanted, dtype, attention)
    model = _sparse(source, attention, model)
    check_used(f"--model {source.name}", unused, model)
    return model


def build(config: RunOptions, source: ModelSource, length: int | None = None) -> Any:
    """The model to train, loaded as `config` says, in less memory and with adapters where asked.

    length: tokens of its sequences, where they are not known to be the options'.
    """
    from ...models.long_context import lightened

    model = load_model(
        source,
        dtype=config.dtype,
        attention=config.attention,
        length=config.context_length if length is None else length,
        scaling=config.rope_scaling,
        given=config.length_options,
        seed=config.seed,
    )
    if not config.lora_rank:
        _check_trainable(source, model)
    model = lightened(model, config.gradient_checkpointing, config.offload_activations, config.mlp_tiles)
    return with_adapters(model, config.lora_rank) if config.lora_rank else model


def _check_trainable(source: ModelSource, model: Any) -> None:
    """ConfigError for weights in which squares of gradients, that AdamW divides by, are 0; adapters are in float32."""
    import torch

    if any(weight.dtype == torch.float16 for weight in model.parameters()):
        raise ConfigError(
            f"--model {source.name}: its weights are of float16, in which a run diverges: give --dtype float32 or "
            "bfloat16, or --lora-rank to train adapters alone"
        )


def check_mixed(config: RunOptions, source: ModelSource) -> None:
    """OptionError for --mixed-precision where what is trained is a checkpoint's own weights, and not of float32."""
    import torch

    own = config.dtype == "auto" and source.weights is not None and not config.lora_rank
    if config.mixed_precision != "no" and own and (found := source.config.dtype) != torch.float32:
        got = "no dtype in its config.json" if found is None else str(found).removeprefix("torch.")
        raise OptionError(
            f"--mixed-precision {config.mixed_precision}: expected float32 weights, --model {source.name} has {got}: "
            "give --dtype float32"
        )


def rounding_of(config: RunOptions, model: Any) -> str | None:
    """What rounding does to weights of bfloat16 that a run trains themselves, and what to give instead; or None.

    AdamW's step is about the learning rate, and a weight of 512 times as much is nearer to itself than to any other.
    """
    import torch

    if config.resume is not None or not any(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters()):
        return None
    return (
        "weights of bfloat16 are trained themselves, and most steps change none of over 512 times the learning rate: "
        f"give {config.whole_weights}, or --lora-rank, whose adapters are float32"
    )


def _transformers_model(source: ModelSource, wanted: Any, dtype: str, attention: str) -> tuple[Any, Iterable[str]]:
    """The model, and the tensors of its checkpoint that it has no place for."""
    import torch
    from transformers import AutoModelForCausalLM

    shared = {
        "attn_implementation": attention if attention in ("sdpa", "eager") else None,
        "trust_remote_code": False,
    }
    if sees_ahead(wanted):
        kind = (wanted.architectures or [wanted.model_type])[0]
        raise ConfigError(
            f"--model {source.name}: expected a causal language model, got {kind}, which sees what follows"
        )
    try:
        if source.weights is None:
            new = torch.float32 if dtype == "auto" else getattr(torch, dtype)
            return AutoModelForCausalLM.from_config(wanted, dtype=new, **shared), ()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.weights,
            config=wanted,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            **shared,
        )
        model, found = loaded
    except Exception as error:  # dtypes and missing files surface as different classes
        raise ConfigError(f"--model {source.name}: {in_one_line(error, 300)}") from None
    check_weights(f"--model {source.name}", source.weights, model, found)
    return model, found["unexpected_keys"]


def check_weights(name: str, place: str, model: Any, found: dict[str, Any]) -> None:
    """ConfigError for a checkpoint with weights of another shape, without some, or of whole numbers.

    found: what `from_pretrained` says of its loading; place: the directory or hub id that it loaded.
    """
    if misfits := sorted(found["mismatched_keys"]):
        named, shape, wanted = misfits[0]
        raise ConfigError(
            f"{name}: its config.json asks for a {named} of {tuple(wanted)}, its weights have {tuple(shape)}"
        )
    check_complete(name, found["missing_keys"])
    if getattr(model.config, "quantization_config", None) is None and (strange := _not_floating(place, model)):
        raise ConfigError(
            f"{name}: expected weights in floating point, got {strange[0]} in {strange[1]}: dequantise them, or say in "
            "its config.json how they are quantised"
        )


def _not_floating(place: str, model: Any) -> tuple[str, str] | None:
    """(name, dtype) of a tensor of whole numbers in a checkpoint where the model's is of floating point; None: none."""
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    floating = [f".{name}" for name, tensor in model.state_dict().items() if tensor.is_floating_point()]
    folder = place if Path(place).is_dir() else snapshot_download(place, local_files_only=True)  # it lies there by now
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                dtype = file.get_slice(key).get_dtype()
                ours = (name for name in floating if name.endswith(f".{key}") or f".{key}".endswith(name))
                if dtype.startswith(WHOLE) and any(ours):
                    return key, dtype
    return None


def check_complete(model: str, missing: Iterable[str]) -> None:
    """ConfigError for a model some of whose weights its checkpoint lacks: they would be random."""
    if names := sorted(missing):
        raise ConfigError(f"{model}: its weights lack {few(names)}, which its config.json asks for")


def check_used(name: str, unused: Iterable[str], model: Any) -> None:
    """ConfigError for tensors without a place that belong to the model's layers: it would be another model without.

    Parts that it does not have at all, such as a tower for images, and old buffers are left out as transformers does.
    """
    tensors, modules = model.state_dict(), {any_layer(module) for module, _ in model.named_modules()}
    kinds = {any_layer(tensor) for tensor in tensors}
    owners = {kind.rpartition(".")[0] for kind in kinds}

    def belongs(tensor: str) -> bool:
        module, _, last = any_layer(tensor).rpartition(".")
        layer = module.rpartition(".")[0]
        another = last in ("weight", "bias") and module not in modules and layer in modules and "*" in layer
        return any_layer(tensor) in kinds or module in owners or another

    if names := sorted(tensor for tensor in set(unused).difference(tensors) if belongs(tensor)):
        raise ConfigError(f"{name}: its weights have {few(names)}, which its config.json has no place for")


def _sparse(source: ModelSource, attention: str, model: Any) -> Any:
    """The model with native sparse attention, where that is asked for or its config says so."""
    from ...models.nsa.layers import attach
    from ...models.nsa.saved import load_parameters

    has = saved_with_nsa(source.config)
    if not has and attention != "nsa":
        return model
    if attention not in ("auto", "nsa"):
        raise OptionError(
            f"--attention {attention}: the config of {source.name} names nsa; leave --attention out, or take nsa out "
            "of its config.json"
        )
    return load_parameters(model, source.weights) if has and source.weights else attach(model)
