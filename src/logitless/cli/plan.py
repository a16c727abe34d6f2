"""`logitless plan`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

import tyro

from ..errors import OptionError
from ..models.catalog import shape_of
from ..models.shapes import ModelShape
from ..units import LARGEST, parse_bytes
from ..workbench.common.files import check_outputs, write_whole
from ..workbench.common.options import (
    MEMORY_BUDGET,
    Checkpointing,
    JsonFile,
    KnownModel,
    LoraRank,
    MlpTiles,
    Offloading,
    PlannedBudget,
    Units,
    budget_bytes,
    require,
)
from ..workbench.plan.algorithms import ALGORITHMS
from ..workbench.plan.fit import fit
from ..workbench.plan.plan import both, sweep
from ..workbench.plan.setting import Setting
from . import options
from .output import deliver

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Will it fit, and where does the memory go: arithmetic, nothing is loaded.

Instant for models of the catalogue; others' layers are traced, which takes some seconds. Prints what each GPU holds,
phase by phase, with dense logits and without them."""
DEFAULT_LENGTHS = {"sft": (0, 2048)}  # prompt, response
SHAPES = ("critic_shape", "reward_shape")
AT_WORK = (512, 1024)
LENGTHS = ("context_length", "prompt_length", "response_length")


@dataclass(frozen=True)
class PlanConfig:
    """Options of `logitless plan`."""

    model: KnownModel = "qwen2.5-1.5b"
    algorithm: Literal["sft", "dpo", "ppo", "grpo", "intuitor", "reinforce", "grade"] = "sft"
    """What is computed in a step, and which further models it keeps."""
    batch_size: int = 8
    """Prompts per optimizer step, on all GPUs together."""
    responses_per_prompt: int = 1
    """Responses per prompt; the group of grpo and intuitor."""
    prompt_length: int | None = None
    """Tokens of a prompt, which have no label. Default: 0 for sft, 512 otherwise."""
    response_length: int | None = None
    """Tokens of a response. Default: 2048 for sft, 1024 otherwise."""
    context_length: int | None = None
    """Tokens of a sequence without a prompt: instead of the two lengths."""
    validation_length: int = 0
    """Tokens of a response in validation; 0: no longer than in training."""
    micro_batch: int = 0
    """Rows of a forward pass, on each GPU (for dpo: pairs); 0, or more than a GPU has: all that it has."""
    rollout_batch: int = 0
    """Sequences generated at a time, on each GPU; 0, or more than a GPU has: all that it has."""
    gpus: str = "1x80GiB"
    """How many GPUs and the memory of one: 8x80GiB, 1x24GB."""
    reserve: str = "2GiB"
    """Of a GPU's memory, for the CUDA context, communication buffers and fragmentation."""
    sharding: Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"] = "ddp"
    """What is divided among the GPUs: nothing, optimizer state, gradients too, parameters too."""
    tensor_parallel: int = 1
    """GPUs that share each matrix, the vocabulary included."""
    context_parallel: int = 1
    """GPUs that share each sequence."""
    optimizer: Literal["adamw-fp32", "adamw-bf16", "adamw-8bit", "sgd", "none"] = "adamw-fp32"
    """The optimizer, with the precision of its state."""
    master_weights: bool = True
    """Keep an fp32 copy of bf16 weights for the optimizer. A run whose weights are fp32 alone, as those of `train
    --mixed-precision bf16`, takes 2 to 13 % more.
    """
    gradient_checkpointing: Checkpointing = False
    offload_activations: Offloading = False
    mlp_tiles: MlpTiles = 1
    lora_rank: LoraRank = 0
    head_format: Literal["bf16", "q8_0", "q6_k", "q4_k", "nf4"] = "bf16"
    """How a frozen head (--lora-rank) is kept: as the model, or in the blocks of GGUF or bitsandbytes."""
    attention: Literal["flash", "eager", "nsa"] = "flash"
    """flash: no scores are made whole; eager: they are; nsa: sparse, with the parameters that it adds."""
    reference: Literal["auto", "yes", "no"] = "auto"
    """Keep a reference model. auto: as the algorithm does; with adapters, their base model serves."""
    critic: Literal["auto", "yes", "no"] = "auto"
    """Keep a critic."""
    reward_model: Literal["auto", "yes", "no"] = "auto"
    """Keep a reward model."""
    critic_shape: str | None = None
    """A critic of another model's shape, named as --model is."""
    reward_shape: str | None = None
    """A reward model of another model's shape."""
    top_k: int = 256
    """Entries of grade's soft tokens. 0: all of them, whose weights are never kept."""
    memory_budget: PlannedBudget = MEMORY_BUDGET
    dense_logits: Literal["all", "response"] = "all"
    """Tokens whose logits the dense way makes: all (transformers, verl), or the response's (TRL's RL trainers)."""
    sweep: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Sequence lengths, algorithms or both to plan, shown in the place of the one plan: --sweep ppo intuitor 2048 8192.
    """
    what_if: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """KEY=VALUE: plan again with this option changed; several are planned one by one."""
    fit: bool = False
    """Search a conservative and an aggressive setting that fit, and say why: batch and lengths may get smaller."""
    components: bool = False
    """List everything that a GPU holds, with its shape and the phases in which it lives."""
    check: bool = False
    """Exit status 1 when the plan without logits does not fit."""
    units: Units = "GiB"
    json: JsonFile = None
    png: Path | None = None
    """Draw the phases into this PNG."""
    html: Path | None = None
    """Write a page that opens offline and plans again as its sliders move."""

    def setting(self) -> Setting:
        """The planner's setting; OptionError or ConfigError for what cannot be planned."""
        count, size = parse_gpus(self.gpus)
        prompt, response = self.lengths()
        same = {f.name for f in fields(Setting)} & {f.name for f in fields(self)}
        given = {name: getattr(self, name) for name in same}
        given |= {"model": _shape(self.model, self.lora_rank), "gpus": count, "gpu_bytes": size}
        given |= {"prompt_length": prompt, "response_length": response}
        given["reserve"] = parse_bytes(self.reserve, "--reserve", least=0)
        given["memory_budget"] = budget_bytes(self.memory_budget)
        given |= {name: _shape(given[name]) for name in SHAPES if given[name] is not None}
        return Setting(**given).check()

    def lengths(self) -> tuple[int, int]:
        """(prompt, response), in tokens."""
        prompt, response = DEFAULT_LENGTHS.get(self.algorithm, AT_WORK)
        if self.context_length is not None:
            if self.prompt_length is not None or self.response_length is not None:
                raise OptionError(
                    "--context-length replaces --prompt-length and --response-length: give one or the other"
                )
            require(1 <= self.context_length <= LARGEST, "context_length", "1 to 2^63-1", self.context_length)
            return 0, self.context_length
        given = self.prompt_length, self.response_length
        return given[0] if given[0] is not None else prompt, given[1] if given[1] is not None else response


def _shape(name: str, rank: int = 0) -> ModelShape:
    """The shape by a name; of a family outside of the catalogue with what its own layers and adapters take."""
    shape = shape_of(name)
    if shape.in_catalog:
        return shape
    from ..workbench.common.say import quiet  # torch and transformers, as for its parameters
    from ..workbench.plan.own_layers import as_traced
    from ..workbench.runs.progress import working
    from .screen import Screen

    quiet()  # of kernels that are to be installed where a model runs
    with working(Screen(stderr=True)) as tell:
        tell(f"tracing the layers of {name}")
        return as_traced(shape, rank)


def parse_gpus(text: str) -> tuple[int, int]:
    """ "8x80GiB" -> (8, bytes of one); OptionError for anything else."""
    match = re.fullmatch(r"\s*(?:(\d{1,9})\s*[x×*]\s*)?([0-9.]{1,18}\s*(?:[KMGT]i?)?B)\s*", text, re.IGNORECASE)
    if match is None:
        raise OptionError(f"--gpus must be a number and a size with its unit, such as 8x80GiB or 1x24GB, got {text!r}")
    return int(match[1] or 1), parse_bytes(match[2], "--gpus")


def main(arguments: Sequence[str]) -> int:
    """Plans, prints, writes; 1 under --check when it does not fit."""
    config = options.parse(PlanConfig, prog="logitless plan", description=DESCRIPTION, arguments=arguments)
    read = {name: getattr(config, name) for name in ("model", *SHAPES)}
    check_outputs({"json": config.json, "png": config.png, "html": config.html}, read)
    setting = config.setting()
    dense, logitless = both(setting)
    lengths = sweep(setting, *swept(chain.from_iterable(config.sweep)))
    given = chain.from_iterable(config.what_if)
    changes = [(change, *both(changed(config, change).setting())) for change in given]
    found = fit(setting, config.units) if config.fit else {}
    from ..workbench.plan import report

    def show(console: Console) -> None:
        if lengths:
            report.show_sweep(lengths, console, config.units)
        if not lengths or config.components:
            report.show(dense, logitless, console, config.units, components=config.components)
        if changes:
            report.show_changes([("as given", dense, logitless), *changes], console, config.units)
        report.show_fits(found, console, config.units)
        console.print(f"[dim]{report.more(config.fit, config.components)}[/dim]", highlight=False)

    value = report.as_json(dense, logitless)
    value["sweep"] = [{"algorithm": row[1].setting.algorithm, **_row("length", *row)} for row in lengths]
    value["what_if"] = [_row("change", *row) for row in changes]
    value["fit"] = report.fits_json(found) or None
    deliver(value, config.json, show)
    if config.html is not None:
        from ..workbench.page.page import write_page

        write_page(config.html, logitless, units=config.units)
    if config.png is not None:
        from ..workbench.plan.plots import draw

        write_whole(config.png, lambda path: draw(dense, logitless, path, config.units))
    return int(config.check and not logitless.fits)


def swept(values: Iterable[str]) -> tuple[list[int], list[str]]:
    """--sweep's lengths and its algorithms; OptionError for what is neither."""
    lengths, algorithms = [], []
    for value in values:
        if re.fullmatch(r"-?\d{1,30}", value):
            lengths.append(int(value))
        elif value in ALGORITHMS:
            algorithms.append(value)
        else:
            raise OptionError(f"--sweep expects tokens or one of {', '.join(ALGORITHMS)}, got {value!r}")
    return lengths, algorithms


def _row(key: str, value: Any, dense: Any, logitless: Any) -> dict[str, Any]:
    from ..workbench.plan.report import plan_json

    return {key: value, "dense": plan_json(dense), "logitless": plan_json(logitless)}


def changed(config: PlanConfig, change: str) -> PlanConfig:
    """The options with one KEY=VALUE of --what-if; OptionError names the nearest keys."""
    key, equals, value = change.partition("=")
    name = key.strip().lstrip("-").replace("-", "_")
    hints = get_type_hints(PlanConfig)
    keys = [f.name for f in fields(Setting) if f.name in hints] + ["context_length"]
    if not equals or name not in keys:
        near = get_close_matches(name, keys, n=3, cutoff=0.4) or keys
        options = ", ".join(k.replace("_", "-") for k in near)
        raise OptionError(f"--what-if {change!r} must be KEY=VALUE with a KEY such as {options}")
    if name in LENGTHS:  # both ways to give lengths, one of which may be in use
        prompt, response = config.lengths()
        lengths = {"prompt_length": prompt, "response_length": response}
        config = replace(config, context_length=None, **(dict.fromkeys(lengths) if name == LENGTHS[0] else lengths))
    return replace(config, **{name: _coerce(value.strip(), hints[name], change)})


def _coerce(text: str, kind: Any, change: str) -> Any:
    choices = get_args(kind)
    if kind is str or str in choices:  # a name, or None
        return text
    if kind is bool:
        if text.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return text.lower() in ("true", "yes", "on", "1")
        raise OptionError(f"--what-if {change!r}: expected true or false")
    if choices and int not in choices:
        if text in choices:
            return text
        raise OptionError(f"--what-if {change!r}: expected one of {', '.join(choices)}")
    if not re.fullmatch(r"-?\d{1,30}", text):
        raise OptionError(f"--what-if {change!r}: expected a whole number")
    return int(text)
