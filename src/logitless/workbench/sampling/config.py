"""`SampleConfig`: the options of `logitless sample`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ...algebra.rules import TEMPERATURES, Order, is_drawing_temperature
from ...printable import is_utf8
from ..common.files import check_outputs
from ..common.options import (
    DEFAULT_MODEL,
    MOST,
    Count,
    Device,
    Dtype,
    JsonFile,
    Keep,
    MemoryBudget,
    TrainedModel,
    check_values,
    require,
)


@dataclass(frozen=True)
class SampleConfig:
    """Options of `logitless sample`; the defaults draw from the model's own distribution."""

    model: TrainedModel = DEFAULT_MODEL
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """What to go on from; give it again for more prompts."""
    prompt_file: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A UTF-8 text file that is one prompt (- for standard input); give it again for more."""
    completions: Count = 1
    """How many completions of each prompt."""
    max_new_tokens: Count = 64
    """Tokens of a completion at most; it also ends where the model ends it, and with the model's context."""
    temperature: float = 1.0
    """Logits are divided by this; 0 takes the best token each time."""
    top_k: int = 0
    """Draw among so many of the best tokens; 0: all."""
    top_p: float = 1.0
    """Draw among the best tokens up to this share of the probability; 1: all."""
    min_p: float = 0.0
    """Draw among tokens with this share of the best one's probability; 0: all."""
    order: Order = "transformers"
    """transformers: top-k, top-p, min-p, each of what those before leave; vllm: min-p first, so that the share of top-p
    is of what it leaves."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that are in the text already less probable; 1: off."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends a completion, and stays in it; give it again for more."""
    seed: int = 0
    """Of the noise; each completion's own is made from it, whatever the batches."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Put each prompt into the tokenizer's chat template, as what the user says. auto: where it has one."""
    keep: Keep = 10
    show_alternatives: bool = False
    """Show a table of what else each token might have been."""
    batch_size: Count = 8
    """Completions that are generated together."""
    memory_budget: MemoryBudget = "auto"
    dtype: Dtype = "auto"
    device: Device = "auto"
    json: JsonFile = None
    """Write text and tokens with their log-probs as JSON to this file (- for standard output)."""
    parquet: Path | None = None
    """Write the records as a parquet table, a row per token."""
    html: Path | None = None
    """Write one HTML page that opens offline and tells about each token under the pointer."""

    def check(self) -> SampleConfig:
        """Itself, or OptionError for the first value without a meaning."""
        check_values(self)
        expected = f"0 (greedy) or in {TEMPERATURES}"
        require(is_drawing_temperature(self.temperature), "temperature", expected, self.temperature)
        require(0 <= self.top_k < MOST, "top_k", "0 or more, less than 2^31", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "in 0 < p <= 1", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "in 0..1", self.min_p)
        require(0 < self.repetition_penalty < float("inf"), "repetition_penalty", "positive", self.repetition_penalty)
        require(0 <= self.seed < 2**63, "seed", "in 0..2^63-1", self.seed)
        require(all(self.stop), "stop", "some text", "none")
        require(all(map(is_utf8, self.stop)), "stop", "UTF-8 text", " ".join(self.stop))
        outputs = {"json": self.json, "parquet": self.parquet, "html": self.html}
        check_outputs(outputs, {"model": self.model, "prompt_file": self.prompt_file})
        return self
