"""A setting as command lines of the tools that run it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from ...models.catalog import HUB
from ...models.presets import PRESETS, TEKKEN_VOCAB
from ...models.shapes import ModelShape
from ...units import plural
from ..common.options import DEFAULT_MODEL
from .plan import plan
from .setting import GIB, Setting, ceil_div

TRL = {"sft": "sft", "dpo": "dpo", "grpo": "grpo", "intuitor": "grpo", "reinforce": "rloo"}
ALIGN = {"dpo": "dpo", "grpo": "grpo", "intuitor": "intuitor", "reinforce": "rloo"}
OPTIM = {
    "adamw-fp32": "adamw_torch_fused",
    "adamw-bf16": "adamw_torch_fused",
    "adamw-8bit": "adamw_bnb_8bit",
    "sgd": "sgd",
}
ACCELERATE = {
    "zero1": ("--use_deepspeed", "--zero_stage 1"),
    "zero2": ("--use_deepspeed", "--zero_stage 2"),
    "zero3": ("--use_deepspeed", "--zero_stage 3", "--zero3_init_flag true"),
    "fsdp2": ("--use_fsdp", "--fsdp_version 2", "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
}
FILLED_IN = ("MODEL", "DATASET", "REWARDS", "SCRIPT")  # what other tools need, and a plan does not know
ALWAYS = ("algorithm", "batch_size", "prompt_length", "response_length")  # whose defaults depend on one another
GROUP = 4  # responses of a prompt that `logitless align` compares unless told otherwise
BETA = 0.04  # of the KL to a reference model (Shao et al., arXiv 2402.03300); 0: no reference model


def launcher(setting: Setting) -> str:
    """`accelerate launch` with the setting's GPUs, sharding and parallelism."""
    parts = ["accelerate launch", f"--num_processes {setting.gpus}", "--num_machines 1", "--mixed_precision bf16"]
    parts += ACCELERATE.get(setting.sharding, ("--multi_gpu",) if setting.gpus > 1 else ())
    if setting.sharding in ACCELERATE:
        parts.append(f"--gradient_accumulation_steps {setting.accumulation}")
    split = {"tp": setting.tensor_parallel, "cp": setting.context_parallel}
    if max(split.values()) > 1 and setting.sharding in ("ddp", "fsdp2"):
        kind = "dp_replicate" if setting.sharding == "ddp" else "dp_shard"
        parts.append("--use_parallelism_config")
        sizes = {kind: setting.ranks, **split}
        parts += [f"--parallelism_config_{name}_size {size}" for name, size in sizes.items() if size > 1]
    return " ".join([*parts, "SCRIPT"])


def logitless_train(setting: Setting) -> str | None:
    """`logitless train`'s command line: supervised training, the ranks by DDP or FSDP2, matrices or sequences split."""
    further = any(setting.keeps(name) for name in ("reference", "critic", "reward_model"))
    if setting.algorithm != "sft" or setting.prompt_length or setting.length < 2 or further or not _splits(setting):
        return None  # every token but the first has a label, and there is one model
    shape, stretched = setting.model, []
    if 0 < shape.positions < setting.length:
        if not shape.stretches:
            return None
        stretched.append(f"--rope-scaling yarn:{ceil_div(setting.length, shape.positions)}")
    named = shape.name in PRESETS or Path(shape.name).is_file()
    fresh = named and shape.name not in HUB and shape.vocab >= TEKKEN_VOCAB and not setting.lora_rank  # from scratch
    parts = [f"--context-length {setting.length}", *stretched, "--loss logitless", *_lighter(setting)]
    return _own("train", shlex.quote(shape.name) if fresh else _named(shape), setting, parts, "fsdp2")


def _lighter(setting: Setting) -> Iterator[str]:
    """The options of `logitless train` that take less of each GPU."""
    if setting.offload_activations:
        yield "--offload-activations"
    if setting.mlp_tiles > 1:
        yield f"--mlp-tiles {setting.mlp_tiles}"
    if setting.attention != "flash":
        yield f"--attention {setting.attention}"
    if setting.sharding == "fsdp2":
        yield "--sharding fsdp2"
    if setting.tensor_parallel > 1:
        yield f"--tensor-parallel {setting.tensor_parallel}"
    if setting.context_parallel > 1:
        yield f"--context-parallel {setting.context_parallel}"


def _splits(setting: Setting) -> bool:
    """Whether `logitless train` splits matrices and sequences so; parts of matrices on several ranks are FSDP2's."""
    tensor, context, shape = setting.tensor_parallel, setting.context_parallel, setting.model
    if setting.length % context or (context > 1 and (setting.attention == "eager" or shape.attention_softcap)):
        return False
    counts = (shape.kv_heads, shape.mlp) if not shape.moe_layers else (1,)
    fits = all(count % tensor == 0 for count in counts)
    return tensor == 1 or (fits and (setting.gpus == tensor or setting.sharding == "fsdp2"))


def logitless_align(setting: Setting) -> str | None:
    """`logitless align`'s command line, where its groups of responses fill whole batches."""
    method, each, shape = ALIGN.get(setting.algorithm), setting.responses_per_prompt, setting.model
    split = setting.tensor_parallel * setting.context_parallel > 1
    further = any(setting.keeps(name) for name in ("critic", "reward_model"))
    if method is None or split or further or not setting.prompt_length or 0 < shape.positions < setting.length:
        return None
    if setting.offload_activations or setting.mlp_tiles > 1 or setting.attention != "flash":
        return None
    parts = [f"--method {method}", f"--prompt-length {setting.prompt_length}"]
    parts.append(f"--completion-length {setting.response_length}")
    if method == "dpo":
        if not setting.keeps("reference"):
            return None
    else:
        whole = setting.micro_rows * setting.accumulation % each == 0
        if _alone(setting) or not whole or setting.rollout_sequences < setting.rows:
            return None
        parts += [f"--generations-per-prompt {each}", f"--beta {BETA if setting.keeps('reference') else 0.0}"]
    model = DEFAULT_MODEL if shape.name == "tiny" else _named(shape)  # the first is trained where there is none
    return _own("align", model, setting, parts)


def _named(shape: ModelShape) -> str | None:
    """--model: weights to start from; None where the name is of a shape alone."""
    path = Path(shape.name)
    saved = any(path.glob("*.safetensors")) or (shape.name.count("/") == 1 and not path.exists())
    return shlex.quote(shape.name) if saved else HUB.get(shape.name)


def _own(command: str, model: str | None, setting: Setting, parts: list[str], *shardings: str) -> str | None:
    """A command of logitless with the options that they share; None for what it leaves to others."""
    if model is None or setting.sharding not in ("ddp", *shardings):
        return None
    if setting != _stepped(setting) or _surplus(setting):
        return None
    start = "logitless" if setting.gpus == 1 else f"torchrun --nproc-per-node {setting.gpus} -m logitless.cli"
    words = [f"{start} {command} --model {model}", *parts, f"--batch-size {setting.micro_rows}"]
    words.append(f"--gradient-accumulation-steps {setting.accumulation}")
    if setting.gradient_checkpointing:
        words.append("--gradient-checkpointing")
    if setting.lora_rank:
        words.append(f"--lora-rank {setting.lora_rank}")
    words.append(f"--memory-budget {to_the_byte(setting.memory_budget)} --dtype bfloat16")
    return " ".join(words)


def _stepped(setting: Setting) -> Setting:
    """The setting with the optimizer of logitless's commands: AdamW, its state in the dtype of what it trains."""
    if setting.lora_rank:  # PEFT keeps adapters in fp32
        return replace(setting, optimizer="adamw-fp32")
    return replace(setting, optimizer="adamw-bf16", master_weights=False)


def _surplus(setting: Setting) -> int:
    """Rows that a step of the commands has beyond the batch: they make equal passes on every rank."""
    made = setting.micro_rows * setting.accumulation * setting.ranks
    return made - setting.batch_rows


def to_the_byte(count: int) -> str:
    """A size as --memory-budget takes it, without rounding."""
    for name, size in (("MiB", 1 << 20), ("MB", 10**6), ("kB", 10**3)):
        if count % size == 0:
            return f"{count // size}{name}"
    return str(count)


def trl(setting: Setting) -> str | None:
    """The line of TRL's trainer, or None where it has none for the algorithm."""
    name = TRL.get(setting.algorithm)
    online = name in ("grpo", "rloo")
    if name is None or _alone(setting) or setting.mlp_tiles > 1 or setting.attention == "nsa":
        return None
    if setting.optimizer not in OPTIM or (setting.offload_activations and online) or _surplus(setting):
        return None
    # AdamW keeps its state in the dtype of what it trains
    if setting.optimizer == ("adamw-bf16" if wide(setting) or setting.lora_rank else "adamw-fp32"):
        return None
    parts = [
        f"trl {name}",
        f"--model_name_or_path {_named(setting.model) or 'MODEL'} --dataset_name DATASET",
        *(["--reward_funcs REWARDS"] if online else []),
        f"--dtype {'float32' if wide(setting) else 'bfloat16'}",
        f"--attn_implementation {'sdpa' if setting.attention == 'flash' else setting.attention}",
        f"--per_device_train_batch_size {setting.micro_rows}",
        f"--gradient_accumulation_steps {setting.accumulation}",
        f"--gradient_checkpointing {_yes(setting.gradient_checkpointing)}",
        "--bf16 true",
        f"--optim {OPTIM[setting.optimizer]}",
    ]
    if setting.offload_activations:
        parts.append("--activation_offloading true")
    parts += _rollouts(setting) if online else _texts(setting)
    if setting.lora_rank:
        rank = setting.lora_rank
        parts.append(f"--use_peft true --lora_r {rank} --lora_alpha {2 * rank} --lora_target_modules all-linear")
    return " ".join(parts)


def wide(setting: Setting) -> bool:
    """Whether TRL's and accelerate's weights are float32, under bf16 autocast: these are their master weights."""
    return setting.master_weights and not setting.lora_rank


def _alone(setting: Setting) -> bool:
    """Whether a response is to be compared with others of its prompt, and there are none."""
    return TRL.get(setting.algorithm) in ("grpo", "rloo") and setting.responses_per_prompt < 2


def _rollouts(setting: Setting) -> list[str]:
    """What TRL's online trainers generate, how many sequences at a time, and whether they keep a reference model."""
    parts = [
        f"--num_generations {setting.responses_per_prompt}",
        f"--max_completion_length {setting.response_length}",
        f"--beta {BETA if setting.keeps('reference') else 0.0}",
    ]
    if setting.rollout_sequences < setting.rows:
        parts.append(f"--steps_per_generation {max(1, setting.rollout_sequences // setting.micro_rows)}")
    return parts


def _texts(setting: Setting) -> list[str]:
    parts = [f"--max_length {setting.length}"]
    if setting.algorithm == "sft" and setting.prompt_length:
        parts.append("--completion_only_loss true")
    if setting.algorithm == "dpo" and not setting.keeps("reference"):
        parts.append("--precompute_ref_log_probs true")
    return parts


def _yes(on: bool) -> str:
    return str(on).lower()


def flags(setting: Setting) -> dict[str, str]:
    """The command lines by tool, those that exist, with words of FILLED_IN; none of them quantises a head."""
    if setting.quantised_head:
        return {}
    lines = {
        "logitless train": logitless_train(setting),
        "logitless align": logitless_align(setting),
        "TRL": trl(setting),
        "accelerate": launcher(setting),
    }
    return {tool: line for tool, line in lines.items() if line is not None}


def planned(setting: Setting) -> str:
    """`logitless plan` of the setting, as it stands."""
    whole = setting.gpu_bytes % GIB == 0
    size = f"{setting.gpu_bytes // GIB}GiB" if whole else f"{setting.gpu_bytes}B"
    words = [f"logitless plan --model {shlex.quote(setting.model.name)}", f"--gpus {setting.gpus}x{size}"]
    same = Setting(setting.model)
    for field in fields(Setting):
        value = getattr(setting, field.name)
        option = field.name.replace("_", "-")
        if field.name in ALWAYS or (value != getattr(same, field.name) and field.name not in ("gpus", "gpu_bytes")):
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{option}")
            else:
                shown = value.name if isinstance(value, ModelShape) else value
                words.append(f"--{option} {shlex.quote(str(shown))}")
    return " ".join(words)


def hint(setting: Setting) -> str | None:
    """The options by which the plan would be of what a command of logitless runs, where these alone differ."""
    if _alone(setting):
        return f"a group of one has no advantage: --responses-per-prompt {GROUP} plans what commands can run"
    if setting.algorithm in TRL and (more := _surplus(setting)):
        rows = f"{plural(more, 'row')} more than the batch has"
        return f"commands make equal passes on every GPU, so {rows}: give another --batch-size or --micro-batch"
    own = _stepped(setting)
    there = replace(own, model=replace(own.model, name=next(iter(HUB.values()))))
    if set(flags(there)) - set(flags(own)):
        return f"{setting.model.name} names no weights to start from: give --model a directory or hub id that has them"
    new = [tool for tool in flags(own) if tool not in flags(setting)]
    options = f"--optimizer {own.optimizer}"
    if setting.master_weights and not own.master_weights:
        options += " --no-master-weights"
    return f"{new[0]} has another optimizer than this plan: {options} plans that one" if new else None


def with_its_own_step(setting: Setting) -> dict[str, str]:
    """The commands of logitless whose optimizer alone differs from the plan's, where they take no more than it."""
    own = _stepped(setting)
    ours = {tool: line for tool, line in flags(own).items() if tool.startswith("logitless")}
    found = {tool: line for tool, line in ours.items() if tool not in flags(setting)}
    return found if plan(own).peak <= plan(setting).peak else {}
