"""`EvalConfig`: every option of `logitless eval`, as one frozen dataclass (no torch import)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ...errors import OptionError
from ..common.files import check_no_folder
from ..common.options import MOST, Option, at_least, check_values, require
from ..scoring.config import TextOptions, named_after

TOKENS, SUMMARY = "tokens.parquet", "summary.json"
FILES = (TOKENS, SUMMARY, "page.html", "documents.jsonl", "records.jsonl")
MOST_OF_NAME = 80  # characters of a folder that is named after tasks


def _check_ranks(name: str, value: tuple[int, ...]) -> None:
    require(all(1 <= k < MOST for k in value), name, "numbers of 1 or more", " ".join(map(str, value)))


@dataclass(frozen=True)
class EvalConfig(TextOptions):
    """Options of `logitless eval`; the command line mirrors them. Raises OptionError from `check`."""

    data: str | None = None
    """The text: a text file or folder, a jsonl or parquet file with a text column or conversations (messages, or prompt
    and completion), whose answers are evaluated, or a `datasets` directory."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness in the place of --data: its names, or YAML files, with spaces or commas between.
    It is installed by itself, `pip install lm-eval`."""
    num_fewshot: int | None = None
    """Examples before each question of --tasks. Default: as the task says."""
    limit: int | None = None
    """Documents of each of --tasks. Default: all of them."""
    against: str | None = None
    """Another model, with the same tokenizer, that each distribution is compared with: KL, reverse KL, JSD, agreement
    of the best entry, ratio of perplexities."""
    out: Path | None = None
    """The folder to write: summary.json, page.html, tokens.parquet, documents.jsonl; of --tasks the first two and
    records.jsonl. Default: NAME.eval for --data NAME, or of the tasks' names, in this directory."""
    top_k: Annotated[tuple[int, ...], Option(check=_check_ranks)] = (5, 10)
    """Ranks up to which a token counts in a top-k accuracy."""
    bins: Annotated[int, Option(check=at_least(1))] = 15
    """Intervals of confidence in which calibration is measured."""

    def check(self) -> EvalConfig:
        """Itself, or OptionError for the first value without a meaning."""
        if self.tasks:
            self._check_tasks()
        elif not self.data:
            raise OptionError("--data is missing: expected text to read, or --tasks with names of lm-eval's tasks")
        elif self.num_fewshot is not None or self.limit is not None:
            raise OptionError("--num-fewshot and --limit are of --tasks, got them with --data: leave them out")
        else:
            self.check_text()
        if self.against == "":
            raise OptionError("--against must be a name or a path, got nothing")
        check_no_folder(self.json, self.folder)
        self.check_files(self.folder, (*FILES, "*.parts"), self.outputs(), against=self.against)
        return self

    def _check_tasks(self) -> None:
        check_values(self)
        if self.data:
            raise OptionError("--data and --tasks: expected one of them; evaluate them one after the other")
        if self.against is not None:
            raise OptionError("--against compares two models on --data; give --data in the place of --tasks")
        for name in ("stride", "bos", "batch_tokens", "top_k"):
            if getattr(self, name) != getattr(EvalConfig, name):
                raise OptionError(f"--{name.replace('_', '-')} is of --data, got it with --tasks: leave it out")
        self.check_context()
        shots, limit = self.num_fewshot, self.limit
        require(shots is None or 0 <= shots < MOST, "num_fewshot", "0 or more, less than 2^31", shots)
        require(limit is None or 1 <= limit < MOST, "limit", "at least 1, less than 2^31", limit)

    @property
    def task_names(self) -> tuple[str, ...]:
        """Each of --tasks by itself; a comma of a file's own name stays."""
        return tuple(n for given in self.tasks for n in ([given] if Path(given).is_file() else given.split(",")))

    @property
    def folder(self) -> Path:
        if self.tasks and self.out is None:
            names = (Path(task).name.removesuffix(".yaml") for task in self.task_names)
            return Path("-".join(names)[:MOST_OF_NAME] + ".eval")
        return self.out or named_after(self.data, "eval")

    @property
    def place(self) -> Path:
        return self.folder / (SUMMARY if self.tasks else TOKENS)

    def outputs(self) -> dict[str, Any]:
        return {"out": tuple(self.folder / name for name in FILES), "json": self.json}

    def deciding(self) -> dict[str, Any]:
        decided = super().deciding()
        if self.tasks:
            own = {"tasks": list(self.task_names), "num_fewshot": self.num_fewshot, "limit": self.limit}
            return {name: decided[name] for name in ("model", "context_length", "dtype")} | own
        return {**decided, "against": self.against, "top_k": list(self.top_k)}
