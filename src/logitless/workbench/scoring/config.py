"""`ScoreConfig`: every option of `logitless score`, as one frozen dataclass (no torch import)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ...errors import OptionError
from ..common.files import check_outputs
from ..common.options import (
    DEFAULT_MODEL,
    MEMORY_BUDGET,
    MOST,
    Count,
    Device,
    Dtype,
    JsonFile,
    Keep,
    MemoryBudget,
    Option,
    TrainedModel,
    budget_bytes,
    check_values,
    require,
)

MOST_CONTEXT = 4096  # unless asked for: attention over more costs more than it tells
DECIDING = ("model", "data", "keep", "context_length", "stride", "bos", "batch_tokens", "dtype")


@dataclass(frozen=True)
class ScoreConfig:
    """Options of `logitless score`; the command line mirrors them. Raises OptionError from `check`."""

    model: TrainedModel = DEFAULT_MODEL
    data: Annotated[str | None, Option(required=True)] = None
    """Text to score: a text file or folder, a jsonl or parquet file with a text column, or a `datasets` directory."""
    out: Path | None = None
    """The parquet file to write, a row per token. Default: NAME.scores.parquet for --data NAME, in this directory."""
    documents: Path | None = None
    """Write a line of JSON per document to this file too: tokens, bytes, perplexity."""
    keep: Keep = 10
    context_length: int | None = None
    """Tokens that the model sees at most. Default: its own positions, 4096 at most."""
    stride: int | None = None
    """Tokens that each further window of a long document scores; the others are context. Default: half of
    --context-length."""
    bos: Literal["auto", "yes", "no"] = "auto"
    """Put the begin-of-text token before each document, so that its first token has a score too. auto: where the
    tokenizer does."""
    batch_tokens: Count = 4096
    """Tokens of a forward pass, padding included."""
    memory_budget: MemoryBudget = MEMORY_BUDGET
    dtype: Dtype = "auto"
    device: Device = "auto"
    json: JsonFile = None

    def check(self) -> ScoreConfig:
        """Itself, or OptionError for the first value without a meaning."""
        if not self.data:
            raise OptionError("--data is missing: expected a text, jsonl or parquet file, or a folder of them")
        check_values(self)
        outputs = {"out": self.place, "documents": self.documents, "json": self.json}
        read = None if self.data is None or Path(self.data).is_dir() else self.data  # below a folder they are no data
        check_outputs(outputs, {"data": read, "model": self.model}, new_folders=True)
        length, stride = self.context_length, self.stride
        expected = "at least 2 (a token and its successor), less than 2^31"
        require(length is None or 2 <= length < MOST, "context_length", expected, length)
        require(stride is None or 1 <= stride < MOST, "stride", "at least 1, less than 2^31", stride)
        return self

    @property
    def memory_budget_bytes(self) -> int:
        return budget_bytes(self.memory_budget)

    @property
    def place(self) -> Path:
        """The file to write."""
        data = Path(self.data or "")
        return self.out or Path(f"{data.name if data.is_dir() else data.stem}.scores.parquet")

    def deciding(self) -> dict[str, Any]:
        """The options that decide what the rows hold: an unfinished run goes on with the same ones only."""
        return {name: getattr(self, name) for name in DECIDING}
