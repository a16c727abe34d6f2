"""`EvalConfig`: every option of `logitless eval`, as one frozen dataclass (no torch import)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ...errors import OptionError
from ..common.files import check_outputs
from ..common.options import MOST, Option, at_least, require
from ..scoring.config import TextOptions, named_after

TOKENS = "tokens.parquet"


def _check_ranks(name: str, value: tuple[int, ...]) -> None:
    require(all(1 <= k < MOST for k in value), name, "numbers of 1 or more", " ".join(map(str, value)))


@dataclass(frozen=True)
class EvalConfig(TextOptions):
    """Options of `logitless eval`; the command line mirrors them. Raises OptionError from `check`."""

    data: str | None = None
    """The text: a text file or folder, a jsonl or parquet file with a text column, or a `datasets` directory."""
    against: str | None = None
    """Another model, with the same tokenizer, that each distribution is compared with: KL, reverse KL, JSD, agreement
    of the best entry, ratio of perplexities."""
    out: Path | None = None
    """The folder to write: tokens.parquet, documents.jsonl, summary.json, page.html. Default: NAME.eval for
    --data NAME, in this directory."""
    top_k: Annotated[tuple[int, ...], Option(check=_check_ranks)] = (5, 10)
    """Ranks up to which a token counts in a top-k accuracy."""
    bins: Annotated[int, Option(check=at_least(1))] = 15
    """Intervals of confidence in which calibration is measured."""

    def check(self) -> EvalConfig:
        """Itself, or OptionError for the first value without a meaning."""
        self.check_text()
        if self.against == "":
            raise OptionError("--against must be a name or a path, got nothing")
        read = None if Path(self.data or "").is_dir() else self.data  # below a folder they are no data
        outputs = {"out": self.place, "json": self.json}
        check_outputs(outputs, {"data": read, "model": self.model, "against": self.against}, new_folders=True)
        return self

    @property
    def folder(self) -> Path:
        return self.out or named_after(self.data, "eval")

    @property
    def place(self) -> Path:
        return self.folder / TOKENS

    def outputs(self) -> dict[str, Path | None]:
        return {"out": self.folder, "json": self.json}

    def deciding(self) -> dict[str, Any]:
        return {**super().deciding(), "against": self.against, "top_k": list(self.top_k)}
