"""`GradeConfig`: every option of alignment through soft tokens, as one frozen dataclass (no torch import)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ...algebra.rules import TEMPERATURES, is_temperature
from ...errors import OptionError
from ..common.options import SMALL_MODEL, Count, LoraRank, Option, ReportTo, RunOptions, TrainedModel, at_least, require

LEGACY = ("ste_legacy", "gumbel_legacy")
METHODS_COMPARED = ("ste", "gumbel", "reinforce", "ppo", *LEGACY)
GRADE_METHODS = (*METHODS_COMPARED, "all")
FULL_RATE, LORA_RATE = 1e-6, 1e-5
EMBEDDED: dict[str, Any] = {  # options with that model
    "prompt_length": 16,
    "completion_length": 20,
    "batch_size": 16,
    "gradient_accumulation_steps": 1,
    "learning_rate": 3e-3,
    "max_steps": 32,
    "beta": 0.02,  # straight-through gradients are a few times too small, which makes the KL weigh more
    "evaluation_prompts": 128,
}


@dataclass(frozen=True)
class GradeConfig(RunOptions):
    """Options of `logitless align --method ste`, gumbel, reinforce or ppo; the command line mirrors them.

    Lengths count tokens. Raises OptionError from `check`.
    """

    method: Literal["ste", "gumbel", "reinforce", "ppo", "ste_legacy", "gumbel_legacy", "all"] = "ste"
    """ste and gumbel backpropagate the reward through the generated tokens, one-hot (straight-through) or soft;
    reinforce is the score function with a moving-average baseline, and ppo four clipped steps with a value head, on the
    same rewards. The two legacy methods keep every distribution over the vocabulary and T graphs, as a widely copied
    implementation does, to compare with. all runs and compares them, the legacy ones where they fit."""
    model: TrainedModel = SMALL_MODEL
    reward_model: str | None = None
    """A sequence classifier of the same vocabulary, a local directory or hub id. Default: one that tells prose from
    code, trained first on files of the standard library that no prompt comes from."""
    reward_label: int | None = None
    """The reward is the probability of this label of the classifier. Default: 1, or 0 where it has one label alone."""
    token_reward: str | None = None
    """In the place of a reward model, a rule: module:function, which gives a number for the text of one token. The
    reward is its mean over a continuation's tokens. Such a run goes on with --resume DIR --trust-config."""
    data: str | None = None
    """Text to cut prompts from: a file or folder, jsonl, parquet or `datasets` directory. Default: this Python's own
    library."""
    prompt_length: Count = 32
    """A prompt has at most so many tokens."""
    completion_length: Count = 64
    """A generated continuation has so many tokens."""
    batch_size: Count = 1
    """How many prompts go through one forward pass."""
    gradient_accumulation_steps: Count = 16
    gradient_checkpointing: bool = True
    """With --carry cached or recompute: recompute activations in backward instead of keeping them."""
    carry: Literal["sweeps", "cached", "recompute"] = "sweeps"
    """How the gradient goes through the generated tokens: backward sweeps over one pass, steps with a cache, or the
    whole prefix anew for each token. All are exact; sweeps is the fastest, cached takes the least memory."""
    max_steps: Count = 40
    learning_rate: float | None = None
    """The rate of every step. For other models than the default one it is, unless given, 1e-5 with --lora-rank and 1e-6
    without."""
    beta: float = 0.1
    """The weight of the KL to the model that the run starts from, per continuation."""
    tau_start: float = 2.0
    """The temperature of the soft tokens at the first step."""
    tau_end: float = 0.5
    """Their temperature at the last step. Between the two it changes linearly."""
    top_k: Annotated[int, Option(check=at_least(0))] = 256
    """How many of the best entries a soft token is made of, and tokens are drawn from. 0 takes the whole vocabulary."""
    baseline_decay: float = 0.9
    """How much of reinforce's moving-average baseline stays at each step."""
    variance_samples: int = 8
    """The variance of one batch's gradient is measured over so many draws of the noise, three times a run. Below 2
    it is not."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    evaluation_prompts: Count = 32
    """How many prompts the policy is validated on, and how many others it is tested on."""
    lora_rank: LoraRank = 16
    report_to: ReportTo = "none"
    seeds: Count = 1
    """How many seeds --method all compares the methods with, from --seed on."""

    def defaults(self) -> GradeConfig:
        return GradeConfig(**EMBEDDED) if self.model == SMALL_MODEL else GradeConfig()

    @property
    def context_length(self) -> int:
        return self.prompt_length + self.completion_length

    @property
    def rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return LORA_RATE if self.lora_rank else FULL_RATE

    def value_of(self, name: str) -> Any:
        own = {"learning_rate": self.rate, "reward_label": 1 if self.reward_label is None else self.reward_label}
        return own[name] if name in own else super().value_of(name)

    def check(self) -> GradeConfig:
        """Itself, or OptionError for the first value without a meaning."""
        self.check_shared()
        for name in ("tau_start", "tau_end"):
            value = getattr(self, name)
            require(is_temperature(value), name, f"in {TEMPERATURES}", value)
        require(0 < self.max_grad_norm < math.inf, "max_grad_norm", "positive", self.max_grad_norm)
        require(0 <= self.beta < math.inf, "beta", "0 or more", self.beta)
        require(0 <= self.baseline_decay < 1, "baseline_decay", "in 0..1, without 1", self.baseline_decay)
        require(self.variance_samples >= 0, "variance_samples", "0 or more", self.variance_samples)
        if self.token_reward is not None and self.reward_model is not None:
            raise OptionError("--token-reward stands in the place of --reward-model: give one of them")
        if self.token_reward is not None and self.reward_label is not None:
            raise OptionError("--reward-label is of a classifier, got it with --token-reward: leave it out")
        require(self.reward_label is None or self.reward_label >= 0, "reward_label", "0 or more", self.reward_label)
        if self.reward_model is None:
            expected = "0 (code) or 1 (prose), the labels of the reward that is learned without --reward-model"
            require(self.reward_label in (None, 0, 1), "reward_label", expected, self.reward_label)
        if self.seeds > 1 and self.method != "all":
            raise OptionError(f"--seeds is of --method all, got it with --method {self.method}: give --seed, or all")
        return self
