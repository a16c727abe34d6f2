"""A setting as command lines of the tools that run it."""

from __future__ import annotations

from .setting import Setting

TRL = {"sft": "sft", "dpo": "dpo", "grpo": "grpo", "intuitor": "grpo", "reinforce": "rloo"}
OPTIM = {
    "adamw-fp32": "adamw_torch_fused",
    "adamw-bf16": "adamw_torch_fused",
    "adamw-8bit": "adamw_bnb_8bit",
    "sgd": "sgd",
}
ACCELERATE = {
    "zero1": ("--use_deepspeed", "--zero_stage 1"),
    "zero2": ("--use_deepspeed", "--zero_stage 2"),
    "zero3": ("--use_deepspeed", "--zero_stage 3"),
    "fsdp2": ("--use_fsdp", "--fsdp_version 2", "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
}


def launcher(setting: Setting) -> str:
    """`accelerate launch` with the setting's GPUs and sharding."""
    parts = ["accelerate launch", f"--num_processes {setting.gpus}", "--mixed_precision bf16"]
    parts += ACCELERATE.get(setting.sharding, ("--multi_gpu",) if setting.gpus > 1 else ())
    return " ".join(parts)


def logitless_train(setting: Setting) -> str | None:
    """`logitless train`'s command line, for what it runs: supervised training without sharding."""
    if setting.algorithm != "sft" or setting.sharding != "ddp" or setting.gpus > 1:
        return None
    parts = [
        f"logitless train --model {setting.model.name}",
        f"--context-length {setting.length}",
        f"--batch-size {setting.micro_rows}",
        f"--gradient-accumulation-steps {setting.accumulation}",
        "--gradient-checkpointing" if setting.gradient_checkpointing else "",
        f"--lora-rank {setting.lora_rank}" if setting.lora_rank else "",
        f"--loss chunked --memory-budget {setting.memory_budget >> 20}MiB",
        "--dtype bfloat16",
    ]
    return " ".join(filter(None, parts))


def trl(setting: Setting) -> str | None:
    """The flags of TRL's trainer, or None where it has none for the algorithm."""
    name = TRL.get(setting.algorithm)
    if name is None:
        return None
    parts = [
        f"trl {name}",
        f"--per_device_train_batch_size {setting.micro_rows}",
        f"--gradient_accumulation_steps {setting.accumulation}",
        f"--gradient_checkpointing {str(setting.gradient_checkpointing).lower()}",
        "--bf16 true",
    ]
    if setting.optimizer in OPTIM:
        parts.append(f"--optim {OPTIM[setting.optimizer]}")
    if name in ("grpo", "rloo"):
        parts.append(f"--num_generations {setting.responses_per_prompt}")
        parts.append(f"--max_completion_length {setting.response_length}")
    else:
        parts.append(f"--max_length {setting.length}")
    if setting.lora_rank:
        parts.append(f"--use_peft --lora_r {setting.lora_rank} --lora_target_modules all-linear")
    return " ".join(parts)


def flags(setting: Setting) -> dict[str, str]:
    """The command lines by tool, those that exist."""
    lines = {"logitless train": logitless_train(setting), "TRL": trl(setting), "accelerate": launcher(setting)}
    return {tool: line for tool, line in lines.items() if line is not None}
