"""`TrainConfig`: every option of a training run, as one frozen dataclass (no torch import)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from ...errors import OptionError
from ...models.positions import parse_scaling
from ..common.options import (
    MOST,
    Count,
    MlpTiles,
    ModelName,
    Offloading,
    ReportTo,
    RunOptions,
    budget_bytes,
    require,
)


@dataclass(frozen=True)
class TrainConfig(RunOptions):
    """Options of `logitless train`; the command line mirrors them.

    Sizes count tokens unless they say otherwise. Raises OptionError from `check`.
    """

    length_options = "--context-length"
    whole_weights = "--dtype float32 --mixed-precision bf16"

    model: ModelName = "tiny"
    """A preset such as tiny or qwen3-0.6b (its shape with random weights), a config.json (the same), a local
    transformers directory, a hub id (owner/name), a GGUF file, or smollm2, a trained model that a package carries."""
    data: str | None = None
    """A text file or folder, a jsonl or parquet file, or a `datasets` directory; rows of messages, or of prompt and
    completion, are conversations. Default: this Python's own library."""
    teacher: str | None = None
    """Learn the distributions of a record that `logitless score` wrote, on its text: --store hidden for the whole
    vocabulary, else its best entries. --data is then not needed, and compared where given."""
    distill_loss: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher‖student), which covers all that the teacher does. reverse: KL(student‖teacher)."""
    distill_tail: Literal["bucket", "decoupled", "tail-aware"] = "bucket"
    """What the teacher gives to all but its best entries. bucket: one more outcome of a record of best entries; of
    hidden states, exact, entry by entry. decoupled: apart from the best entries, each part once. tail-aware: of hidden
    states, --distill-tail-weight times as much, over the tail's mean of the row."""
    distill_tail_weight: float = 2.0
    """How much --distill-tail tail-aware makes of all but the best entries."""
    distill_top_k: Count = 20
    """How many best entries --distill-tail decoupled and tail-aware set apart where the record holds hidden states."""
    distill_weight: float = 1.0
    """The teacher's share of the loss, in 0..1; the rest is the cross-entropy of the text."""
    distill_temperature: float = 1.0
    """Divides both logits, and its square multiplies the divergence. Needs a record of hidden states."""
    teacher_ids: str | None = None
    """A JSON list or .npy of the teacher's id of each of the student's entries, where the vocabularies differ."""
    loss_on: Literal["all", "completions"] = "completions"
    """Of conversations: learn the assistant's tokens alone, or all of them."""
    context_length: int = 256
    """Tokens per sequence; documents are packed into full sequences."""
    batch_size: Count = 4
    """Sequences per forward pass and device."""
    max_steps: Count = 48
    learning_rate: float | None = None
    """Peak of a cosine schedule. Default: 3e-3 from scratch, 2e-5 for pretrained weights, 2e-4 with LoRA."""
    attention: Literal["auto", "sdpa", "eager", "nsa"] = "auto"
    """nsa: native sparse attention, memory linear in the context. auto: as the checkpoint's config says, else sdpa."""
    mlp_tiles: MlpTiles = 1
    offload_activations: Offloading = False
    mixed_precision: Literal["no", "bf16"] = "no"
    """bf16: weights and AdamW's state stay in float32, and matrices are multiplied in bfloat16, by torch's autocast."""
    rope_scaling: str = ""
    """KIND:FACTOR, such as yarn:4, to go beyond the model's positions: yarn or linear."""
    sharding: Literal["ddp", "fsdp2"] = "ddp"
    """What several ranks divide beside the data: nothing, or weights, gradients and optimizer state."""
    tensor_parallel: Count = 1
    """Ranks that share each matrix, and see the same sequences."""
    context_parallel: Count = 1
    """Ranks that share each sequence, a part of it each."""
    rank_timeout: Count = 1800
    """Seconds that a rank waits for the others before it gives up."""
    loss: Literal["auto", "dense", "logitless"] = "auto"
    """auto: dense where one forward pass's logits fit --loss-threshold, logitless above it."""
    loss_threshold: str | None = None
    """Logits up to this size are made whole, such as 10GB. Default: --memory-budget, so that they never take more."""
    report_to: ReportTo = "none"

    @property
    def loss_threshold_bytes(self) -> int:
        """Of one forward pass's logits."""
        given = self.loss_threshold
        return self.memory_budget_bytes if given is None else budget_bytes(given, "--loss-threshold")

    @property
    def loss_on_ranks(self) -> Literal["auto", "dense", "logitless"]:
        """How the loss is computed: logits that are split over ranks, or compared with a teacher's, are never made."""
        return self.loss if self.tensor_parallel == 1 and self.teacher is None else "logitless"

    def check(self) -> TrainConfig:
        """Itself, or OptionError for the first value without a meaning."""
        self.check_shared()
        expected = "at least 2 (a token and its successor), less than 2^31"
        require(2 <= self.context_length < MOST, "context_length", expected, self.context_length)
        if self.loss_threshold is not None:
            budget_bytes(self.loss_threshold, "--loss-threshold")
            if self.loss != "auto":
                raise OptionError(f"--loss-threshold is where --loss auto changes, got it with --loss {self.loss}")
            if self.loss_on_ranks != "auto" and self.resume is None:  # a run may have begun with it
                option = "--teacher" if self.teacher is not None else f"--tensor-parallel {self.tensor_parallel}"
                raise OptionError(f"--loss-threshold: with {option} no whole logits are made; leave it out")
        self._check_split()
        self._check_teacher()
        expected = "float32 with --mixed-precision bf16, which rounds what is multiplied and keeps weights whole"
        whole = self.mixed_precision == "no" or self.lora_rank > 0 or self.dtype != "bfloat16"
        require(whole, "dtype", expected, self.dtype)
        if self.offload_activations and not self.gradient_checkpointing:
            raise OptionError("--offload-activations needs --gradient-checkpointing: it moves what that keeps")
        if self.rope_scaling:
            parse_scaling(self.rope_scaling)
        return self

    def _check_teacher(self) -> None:
        """OptionError for distillation without a meaning, or without a teacher."""
        if self.teacher is None:
            for field in fields(self):
                name, got = field.name, getattr(self, field.name)
                if name.startswith(("distill_", "teacher_")) and got != field.default:
                    option = name.replace("_", "-")
                    raise OptionError(f"--{option} {got} is of --teacher: give a record, or leave it out")
            return
        require(0 < self.distill_weight <= 1, "distill_weight", "above 0, at most 1", self.distill_weight)
        temperature = self.distill_temperature
        require(1e-3 <= temperature <= 1e3, "distill_temperature", "in 0.001..1000", temperature)  # its square scales
        tail, tail_weight = self.distill_tail, self.distill_tail_weight
        require(math.isfinite(tail_weight) and tail_weight > 0, "distill_tail_weight", "positive", tail_weight)
        if tail != "bucket" and self.distill_loss == "reverse":
            raise OptionError(f"--distill-tail {tail} is of --distill-loss forward: give one of the two")
        if tail != "tail-aware" and tail_weight != TrainConfig.distill_tail_weight:
            raise OptionError(f"--distill-tail-weight {tail_weight:g} is of --distill-tail tail-aware: give both")
        if tail == "bucket" and (k := self.distill_top_k) != TrainConfig.distill_top_k:
            raise OptionError(f"--distill-top-k {k} is of --distill-tail decoupled or tail-aware: give both")
        if self.loss_on != TrainConfig.loss_on:
            raise OptionError(f"--loss-on {self.loss_on} is of conversations, not of --teacher: give one of the two")
        if self.loss == "dense":
            raise OptionError("--loss dense: with --teacher no logits are made; leave it out")
        for name in ("tensor_parallel", "context_parallel"):
            expected = "1 with --teacher, whose ranks share the data or the weights (--sharding fsdp2)"
            require(getattr(self, name) == 1, name, expected, getattr(self, name))

    def _check_split(self) -> None:
        """OptionError for ranks that cannot share matrices or sequences."""
        length, ranks = self.context_length, self.context_parallel
        fitting = f"a multiple of --context-parallel {ranks}, such as {-(-length // ranks) * ranks}"
        require(length % ranks == 0, "context_length", fitting, length)
        if self.tensor_parallel > 1 and self.loss == "dense":
            raise OptionError(
                f"--loss dense: expected whole logits, --tensor-parallel {self.tensor_parallel} splits them; "
                "use --loss logitless"
            )
        if ranks > 1 and self.attention == "eager":
            raise OptionError(f"--context-parallel {ranks} knows no --attention eager: use sdpa or nsa")
