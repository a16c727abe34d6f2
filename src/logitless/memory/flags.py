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
    "zero3": ("--use_deepspeed", "--zero_stage 3", "--zero3_init_flag true"),
    "fsdp2": ("--use_fsdp", "--fsdp_version 2", "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
}
BETA = 0.04  # of the KL to a reference model (Shao et al., arXiv 2402.03300); 0: no reference model


def launcher(setting: Setting) -> str:
    """`accelerate launch` with the setting's GPUs, sharding and parallelism."""
    parts = ["accelerate launch", f"--num_processes {setting.gpus}", "--num_machines 1", "--mixed_precision bf16"]
    parts += ACCELERATE.get(setting.sharding, ("--multi_gpu",) if setting.gpus > 1 else ())
    if setting.sharding in ACCELERATE:
        parts.append(f"--gradient_accumulation_steps {setting.accumulation}")
    split = {"tp": setting.tensor_parallel, "cp": setting.context_parallel}
    if max(split.values()) > 1 and setting.sharding in ("ddp", "fsdp2"):
        ranks = setting.gpus // (split["tp"] * split["cp"])
        kind = "dp_replicate" if setting.sharding == "ddp" else "dp_shard"
        parts.append("--use_parallelism_config")
        sizes = {kind: ranks, **split}
        parts += [f"--parallelism_config_{name}_size {size}" for name, size in sizes.items() if size > 1]
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
    # TRL's master weights are fp32 parameters under bf16 autocast
    wide = setting.master_weights and not setting.lora_rank and setting.optimizer != "none"
    parts = [
        f"trl {name}",
        f"--dtype {'float32' if wide else 'bfloat16'}",
        f"--attn_implementation {'sdpa' if setting.attention == 'flash' else setting.attention}",
        f"--per_device_train_batch_size {setting.micro_rows}",
        f"--gradient_accumulation_steps {setting.accumulation}",
        f"--gradient_checkpointing {_yes(setting.gradient_checkpointing)}",
        "--bf16 true",
    ]
    if setting.optimizer in OPTIM:
        parts.append(f"--optim {OPTIM[setting.optimizer]}")
    parts += _rollouts(setting) if name in ("grpo", "rloo") else _texts(setting)
    if setting.lora_rank:
        rank = setting.lora_rank
        parts.append(f"--use_peft true --lora_r {rank} --lora_alpha {2 * rank} --lora_target_modules all-linear")
    return " ".join(parts)


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
    """The command lines by tool, those that exist."""
    lines = {"logitless train": logitless_train(setting), "TRL": trl(setting), "accelerate": launcher(setting)}
    return {tool: line for tool, line in lines.items() if line is not None}
