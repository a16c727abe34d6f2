"""`DemoConfig`: the options of `logitless demo` (no torch import)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..common.files import check_utf8
from ..common.options import Count, Device, JsonFile, MemoryBudget, ModelName, check_values, require

TEXT, TRAINED, PAGE = WRITTEN = ("text", "train", "demo.html")  # what the demo writes into its directory


@dataclass(frozen=True)
class DemoConfig:
    """Options of `logitless demo`; the command line mirrors them."""

    model: ModelName = "smollm2"
    """smollm2, or any model whose tokenizer has a chat template: a directory, a hub id (owner/name) or a GGUF file."""
    max_steps: Count = 12
    """Optimizer steps."""
    max_new_tokens: Count = 64
    """Of an answer, at most."""
    learning_rate: float = 2e-3
    """Peak of a cosine schedule, of adapters of rank 16."""
    memory_budget: MemoryBudget = "16MiB"
    seed: int = 0
    """Of the order of the conversations, the adapters and the tokens that are drawn."""
    device: Device = "auto"
    output_dir: Path | None = None
    """Where everything is written. Default: the first free runs/demo, runs/demo-2, ..."""
    json: JsonFile = None

    def check(self) -> DemoConfig:
        """Itself, or OptionError for the first value without a meaning."""
        check_values(self)
        check_utf8("output-dir", self.output_dir or Path("runs"))
        require(0 <= self.seed < 2**32, "seed", "in 0..2^32-1", self.seed)
        rate = self.learning_rate
        require(math.isfinite(rate) and rate > 0, "learning_rate", "positive", rate)
        return self
