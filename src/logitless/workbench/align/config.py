"""`AlignConfig`: every option of an alignment run, as one frozen dataclass (no torch import)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...algebra.options import MOST_FLOAT
from ...algebra.rules import TEMPERATURES, Order, is_temperature
from ...errors import OptionError
from ..common.options import DEFAULT_MODEL, Count, ReportTo, RunOptions, TrainedModel, require


@dataclass(frozen=True)
class Method:
    """What a method does, and the options that it has its own defaults for."""

    what: str
    beta: float  # weight of the KL to the reference
    repetition_guard: float = 0.0
    rewards: str = ""  # without --rewards
    rollouts: bool = True  # samples completions; otherwise it learns from pairs


METHODS: dict[str, Method] = {
    "intuitor": Method("GRPO on the policy's own self-certainty", beta=0.04, repetition_guard=5.0),
    "grpo": Method("group-relative policy optimisation", beta=0.04, rewards="python_lines"),
    "rloo": Method("REINFORCE with a leave-one-out baseline", beta=0.05, rewards="python_lines"),
    "dpo": Method("direct preference optimisation", beta=0.1, rollouts=False),
}
EXACT_KL = ("intuitor", "grpo")  # rloo puts its KL into the reward, dpo has none
DEFAULT_MODEL_RATE, FULL_RATE, LORA_RATE = 1e-4, 1e-6, 1e-5


@dataclass(frozen=True)
class AlignConfig(RunOptions):
    """Options of `logitless align`; the command line mirrors them.

    Lengths count tokens. Raises OptionError from `check`.
    """

    method: Literal["intuitor", "grpo", "rloo", "dpo"] = "intuitor"
    """intuitor learns from self-certainty, grpo and rloo from reward functions, dpo from pairs. ste, gumbel, reinforce,
    ppo, ste_legacy, gumbel_legacy and all: see --method all --help."""
    model: TrainedModel = DEFAULT_MODEL
    data: str | None = None
    """Prompts (pairs, for dpo) of text or of messages, in a jsonl, parquet or `datasets` directory, or text to cut them
    from. Default: this Python's own library."""
    prompt_length: Count = 64
    """Prompts that are cut from text have at most so many tokens."""
    completion_length: Count = 32
    """A sampled completion has at most so many tokens."""
    batch_size: Count = 16
    """How many completions (for dpo: pairs) go through one forward pass on each device."""
    generations_per_prompt: int = 4
    """How many completions of one prompt are sampled, whose rewards are compared with each other."""
    max_steps: Count = 32
    learning_rate: float | None = None
    """The peak of a cosine schedule. By default it is 1e-5 with --lora-rank, else 1e-4 for the default model and 1e-6
    for others."""
    beta: float | None = None
    """The weight of the KL to the model that the run starts from. By default it is 0.04, for rloo 0.05, for dpo 0.1."""
    exact_kl: bool = False
    """Take intuitor's or grpo's KL over the whole vocabulary, in the place of its estimate from the sampled tokens."""
    temperature: float = 1.0
    """The temperature of sampling, and for rollouts of the log-probs and of self-certainty."""
    top_p: float = 1.0
    """Sample from the fewest entries that hold this share of the mass. Below 1, policy and reference are scored over
    the same entries."""
    min_p: float = 0.0
    """Sample from entries that have at least this share of the best one's probability. Above 0, policy and reference
    are scored over the same entries."""
    order: Order = "transformers"
    """Which of these two comes first: transformers takes --top-p of all entries, vllm of what --min-p leaves."""
    rewards: str | None = None
    """Further rewards, separated by commas, are python_lines, repetition_guard or module:function, each once, with
    =WEIGHT if not 1. By default it is python_lines for grpo and rloo, and none for intuitor. A run with a
    function of a module goes on with --resume DIR --trust-config."""
    self_certainty_weight: float = 1.0
    """How much intuitor's own reward weighs beside the others."""
    repetition_guard: float | None = None
    """The weight of the reward against repeated n-grams, for intuitor in nats. By default it is 5 there, else 0."""
    report_to: ReportTo = "none"

    @property
    def kind(self) -> Method:
        return METHODS[self.method]

    @property
    def context_length(self) -> int:
        return self.prompt_length + self.completion_length

    @property
    def kl_weight(self) -> float:
        return self.kind.beta if self.beta is None else self.beta

    @property
    def guard_weight(self) -> float:
        return self.kind.repetition_guard if self.repetition_guard is None else self.repetition_guard

    @property
    def replays(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary, over which they are to be scored."""
        return self.top_p < 1 or self.min_p > 0

    @property
    def rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        if self.lora_rank:
            return LORA_RATE
        return DEFAULT_MODEL_RATE if self.model == DEFAULT_MODEL else FULL_RATE

    def value_of(self, name: str) -> Any:
        own = {"beta": self.kl_weight, "repetition_guard": self.guard_weight, "learning_rate": self.rate}
        return own[name] if name in own else super().value_of(name)

    def prompts_per_step(self, ranks: int) -> int:
        """Prompts whose completions an optimizer step learns from."""
        return self.batch_size * self.gradient_accumulation_steps * ranks // self.generations_per_prompt

    def check(self) -> AlignConfig:
        """Itself, or OptionError for the first value without a meaning."""
        self.check_shared()
        for name in ("beta", "repetition_guard", "self_certainty_weight"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MOST_FLOAT, name, "0 or more, and finite in float32", value)
        require(is_temperature(self.temperature), "temperature", f"in {TEMPERATURES}", self.temperature)
        require(0 < self.top_p <= 1, "top_p", "in 0 < p <= 1", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "in 0..1", self.min_p)
        self._check_whole_rows()
        if self.kind.rollouts:
            self._check_groups()
        elif self.rewards or self.repetition_guard:
            raise OptionError("--method dpo learns from pairs: leave out --rewards and --repetition-guard")
        if self.method != "intuitor" and self.self_certainty_weight != 1:
            raise OptionError(f"--self-certainty-weight is intuitor's, got it with --method {self.method}")
        none = not (self.rewards or "").strip(" ,")
        if self.method == "intuitor" and not self.self_certainty_weight and none:
            raise OptionError("--self-certainty-weight 0 leaves intuitor without a reward: give --rewards")
        if self.kind.rewards and self.rewards is not None and none and not self.guard_weight:
            raise OptionError(f"--rewards {self.rewards!r} leaves {self.method} without a reward: name one")
        return self

    def _check_whole_rows(self) -> None:
        if self.exact_kl and self.method not in EXACT_KL:
            raise OptionError(
                f"--exact-kl is of {' and '.join(EXACT_KL)}, whose loss has a KL; got it with {self.method}"
            )
        if self.exact_kl and not self.kl_weight:
            raise OptionError("--exact-kl with --beta 0 has no KL to be exact about: leave one of them out")
        if self.replays and (self.exact_kl or not self.kind.rollouts):
            other = "--exact-kl, which is of the whole vocabulary" if self.exact_kl else f"--method {self.method}"
            raise OptionError(f"--top-p and --min-p say what completions are sampled from, got them with {other}")
        if self.order != "transformers" and not self.replays:
            raise OptionError(f"--order {self.order} is of --top-p and --min-p: give them, or leave it out")

    def _check_groups(self) -> None:
        size = self.generations_per_prompt
        require(size >= 2, "generations_per_prompt", "at least 2, to compare", size)
        sampled = self.batch_size * self.gradient_accumulation_steps
        if sampled % size:
            raise OptionError(
                f"--batch-size times --gradient-accumulation-steps is {sampled}: expected a multiple of "
                f"--generations-per-prompt {size}"
            )
