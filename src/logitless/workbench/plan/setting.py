"""`Setting`: every knob of a planned run, checked, with the counts that follow from it (no torch import)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...algebra.costs import DEFAULT_BUDGET
from ...errors import OptionError
from ...models.shapes import ModelShape
from ...units import LARGEST, format_bytes
from ..common.options import require
from .algorithms import ALGORITHMS, Algorithm

GIB = 1 << 30
OPTIMIZERS = {  # bytes per trained parameter, as a fraction
    "adamw-fp32": (8, 1),
    "adamw-bf16": (4, 1),
    "adamw-8bit": (65, 32),  # two bytes, and an fp32 scale for 256 of each
    "sgd": (0, 1),
    "none": (0, 1),
}
HEAD_FORMATS = {  # bytes per number of a head, as a fraction, its scales included
    "bf16": (2, 1),
    "q8_0": (34, 32),
    "q6_k": (210, 256),
    "q4_k": (144, 256),
    "nf4": (9, 16),  # an fp32 scale for 64 of them
}
SHARDINGS = {  # what is divided among the data-parallel GPUs
    "ddp": frozenset(),
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"optimizer", "gradients"}),
    "zero3": frozenset({"optimizer", "gradients", "parameters"}),
    "fsdp2": frozenset({"optimizer", "gradients", "parameters"}),
}
CHOICES = {
    "algorithm": tuple(ALGORITHMS),
    "optimizer": tuple(OPTIMIZERS),
    "sharding": tuple(SHARDINGS),
    "attention": ("flash", "eager", "nsa"),
    "head_format": tuple(HEAD_FORMATS),
    "dense_logits": ("all", "response"),
    "reference": ("auto", "yes", "no"),
    "critic": ("auto", "yes", "no"),
    "reward_model": ("auto", "yes", "no"),
}
AT_LEAST_ONE = (
    "batch_size",
    "responses_per_prompt",
    "response_length",
    "gpus",
    "gpu_bytes",
    "tensor_parallel",
    "context_parallel",
    "memory_budget",
    "mlp_tiles",
)
AT_LEAST_ZERO = ("prompt_length", "validation_length", "micro_batch", "rollout_batch", "lora_rank", "top_k", "reserve")


@dataclass(frozen=True)
class Setting:
    """One planned run. Rows are sequences, for dpo pairs of them; lengths count tokens, sizes bytes."""

    model: ModelShape
    algorithm: str = "sft"
    batch_size: int = 64  # prompts an optimizer step, on all GPUs together
    responses_per_prompt: int = 1
    prompt_length: int = 0
    response_length: int = 2048
    validation_length: int = 0  # longest response in validation; 0: no longer than in training
    micro_batch: int = 0  # rows a forward pass, on each GPU; 0: all that a GPU has
    rollout_batch: int = 0  # sequences generated at a time, on each GPU; 0: all that a GPU has
    gpus: int = 1
    gpu_bytes: int = 80 * GIB
    reserve: int = 2 * GIB  # CUDA context, communication buffers, fragmentation
    sharding: str = "ddp"
    tensor_parallel: int = 1
    context_parallel: int = 1
    optimizer: str = "adamw-fp32"
    master_weights: bool = True
    gradient_checkpointing: bool = False
    offload_activations: bool = False  # what checkpointing keeps waits on the host
    mlp_tiles: int = 1  # pieces of the sequence in which an MLP is computed
    lora_rank: int = 0
    head_format: str = "bf16"
    attention: str = "flash"
    reference: str = "auto"
    critic: str = "auto"
    reward_model: str = "auto"
    critic_shape: ModelShape | None = None  # None: the model's
    reward_shape: ModelShape | None = None
    top_k: int = 256  # entries of a soft token; 0: all
    memory_budget: int = DEFAULT_BUDGET
    dense_logits: str = "all"

    def check(self) -> Setting:
        """Itself, its model with the attention asked for, or OptionError for the first value without a meaning."""
        for name, allowed in CHOICES.items():
            require(getattr(self, name) in allowed, name, f"one of {', '.join(allowed)}", getattr(self, name))
        for name in AT_LEAST_ONE:
            require(1 <= getattr(self, name) <= LARGEST, name, "1 to 2^63-1", getattr(self, name))
        for name in AT_LEAST_ZERO:
            require(0 <= getattr(self, name) <= LARGEST, name, "0 to 2^63-1", getattr(self, name))
        split = self.tensor_parallel * self.context_parallel
        require(self.gpus % split == 0, "gpus", f"a multiple of tensor × context parallelism ({split})", self.gpus)
        for shape in (self.model, self.critic_shape or self.model, self.reward_shape or self.model):
            divides = shape.heads % self.tensor_parallel == 0
            require(divides, "tensor_parallel", f"a divisor of {shape.heads} heads", self.tensor_parallel)
        if self.offload_activations and not self.gradient_checkpointing:
            raise OptionError("--offload-activations needs --gradient-checkpointing: it moves what that keeps")
        if self.mlp_tiles > 1 and self.model.moe_layers:
            raise OptionError(f"--mlp-tiles needs dense MLPs: {self.model.name} has layers that route")
        if self.quantised_head and (not self.lora_rank or self.model.tied or self.kind.soft_tokens):
            raise OptionError(
                f"--head-format {self.head_format} needs a frozen head of its own, so --lora-rank and an untied model, "
                "and no soft tokens; leave it out"
            )
        if self.context_parallel > 1 and self.attention == "eager":
            raise OptionError(
                f"--context-parallel {self.context_parallel} knows no --attention eager: use flash or nsa"
            )
        if self.reserve >= self.gpu_bytes:
            raise OptionError(
                f"--reserve {format_bytes(self.reserve)} leaves nothing of a GPU's {format_bytes(self.gpu_bytes)}"
            )
        sparse, shape = self.attention == "nsa", self.model
        if sparse and (shape.attention_softcap or shape.windowed_layers):
            raise OptionError(
                f"--attention nsa needs layers like Qwen3's: those of {shape.name} have a softcap or windows"
            )
        if sparse and self.tensor_parallel > 1:
            raise OptionError(
                f"--tensor-parallel {self.tensor_parallel} cannot split --attention nsa; use --sharding fsdp2"
            )
        return self if shape.sparse == sparse else replace(self, model=replace(shape, sparse=sparse))

    @property
    def kind(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]

    @property
    def quantised_head(self) -> bool:
        """Whether the head is kept in few bits and dequantised slice by slice."""
        return self.head_format != "bf16"

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_length + self.response_length

    @property
    def shards(self) -> int:
        """GPUs among which ZeRO and FSDP2 divide."""
        return self.gpus // self.tensor_parallel

    @property
    def ranks(self) -> int:
        """GPUs, or groups of them that split matrices or sequences, with rows of their own."""
        return self.gpus // (self.tensor_parallel * self.context_parallel)

    @property
    def batch_rows(self) -> int:
        """Rows of the batch, all GPUs, an optimizer step."""
        return self.batch_size * self.responses_per_prompt

    @property
    def rows(self) -> int:
        """Rows of the batch on each GPU, an optimizer step."""
        return ceil_div(self.batch_rows, self.ranks)

    @property
    def micro_rows(self) -> int:
        return min(self.micro_batch or self.rows, self.rows)

    @property
    def accumulation(self) -> int:
        """Forward passes an optimizer step."""
        return ceil_div(self.rows, self.micro_rows)

    @property
    def micro_sequences(self) -> int:
        return self.micro_rows * self.kind.sequences

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass on each GPU."""
        return self.micro_sequences * ceil_div(self.length, self.context_parallel)

    @property
    def response_tokens(self) -> int:
        """Those of them that have a label."""
        return self.micro_sequences * ceil_div(self.response_length, self.context_parallel)

    @property
    def rollout_sequences(self) -> int:
        """Sequences generated at a time on each GPU; context parallelism does not divide them."""
        mine = ceil_div(self.batch_rows, self.shards)
        return min(self.rollout_batch or mine, mine)

    @property
    def rollout_length(self) -> int:
        return self.prompt_length + max(self.response_length, self.validation_length)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, all GPUs."""
        return self.batch_rows * self.kind.sequences * self.length

    def keeps(self, name: str) -> bool:
        """Whether there is a `reference`, `critic` or `reward_model`."""
        asked = getattr(self, name)
        return getattr(self.kind, name) if asked == "auto" else asked == "yes"

    def divided(self, count: int, what: str) -> int:
        """The share of `count` on each GPU under the sharding."""
        return ceil_div(count, self.shards) if what in SHARDINGS[self.sharding] else count


def ceil_div(count: int, parts: int) -> int:
    """Whole-number division, rounded up; exact for any size, unlike a float's."""
    return -(-count // parts)
