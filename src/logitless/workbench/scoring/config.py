"""`TextOptions`, of whatever reads text by a model, and `ScoreConfig`, of `logitless score` (no torch import)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Annotated, Any, Literal

from ...errors import OptionError
from ..common.files import check_apart, check_outputs, each_path
from ..common.options import (
    DEFAULT_MODEL,
    MOST,
    Count,
    Device,
    Dtype,
    JsonFile,
    Keep,
    MemoryBudget,
    Option,
    TrainedModel,
    budget_bytes_on,
    check_values,
    require,
)
from ..common.written import is_result

MOST_CONTEXT = 4096  # unless asked for: attention over more costs more than it tells
OTHER_FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".txt")  # that a name of parquet would promise
SUFFIXES = (".txt", ".text", ".md", ".json", ".jsonl", ".parquet")  # that say of a name that it is text
DECIDING = ("model", "data", "context_length", "stride", "bos", "batch_tokens", "dtype")


@dataclass(frozen=True)
class TextOptions:
    """What is read, by which model, and how: options that `logitless score` and `logitless eval` share."""

    model: TrainedModel = DEFAULT_MODEL
    data: Annotated[str | None, Option(required=True)] = None
    """The text: a text file or folder, a jsonl or parquet file with a text column or conversations (messages, or prompt
    and completion), whose answers are scored, or a `datasets` directory."""
    context_length: int | None = None
    """Tokens that the model sees at most. Default: its own positions, 4096 at most."""
    stride: int | None = None
    """Tokens that each further window of a long document scores; the others are context. Default: half of
    --context-length."""
    bos: Literal["auto", "yes", "no"] = "auto"
    """Put the begin-of-text token before each document, so that its first token has a score too. auto: what the
    tokenizer itself puts there."""
    batch_tokens: Count = 4096
    """Tokens of a forward pass, padding included."""
    memory_budget: MemoryBudget = "auto"
    dtype: Dtype = "auto"
    device: Device = "auto"
    json: JsonFile = None

    def check_files(self, folder: Path, names: tuple[str, ...], outputs: dict[str, Any], **read: Any) -> None:
        """OptionError for outputs that cannot be written, are inputs, or, as inputs, are among these names there.

        Below a folder with the text only what a run before has written is replaced.
        """
        apart = {name: path for name, path in outputs.items() if name != "out"}
        check_apart({**apart, "data": self.data, "model": self.model, **read}, folder, names)
        among = Path(self.data or "").is_dir()
        check_outputs(outputs, {"data": None if among else self.data, "model": self.model, **read}, new_folders=True)
        if among and not parts_of(self.place).exists():
            for name, path in each_path(outputs):
                if path != self.place and not is_result(path):  # which is not replaced, or replaces its like
                    check_outputs({name: path}, {"data": self.data}, new_folders=True)

    def check_text(self) -> None:
        """OptionError for the first of these values, or of those with a check, without a meaning."""
        if not self.data:
            raise OptionError("--data is missing: expected a text, jsonl or parquet file, or a folder of them")
        check_values(self)
        self.check_context()
        stride = self.stride
        require(stride is None or 1 <= stride < MOST, "stride", "at least 1, less than 2^31", stride)

    def check_context(self) -> None:
        """OptionError for a --context-length in which no token is predicted."""
        expected = "at least 2 (a token and its successor), less than 2^31"
        length = self.context_length
        require(length is None or 2 <= length < MOST, "context_length", expected, length)

    @property
    def memory_budget_bytes(self) -> int:
        return budget_bytes_on(self.device, self.memory_budget)

    @property
    def place(self) -> Path:
        """The parquet file to write, a row per token."""
        raise NotImplementedError

    def outputs(self) -> dict[str, Any]:
        """The files that are written, one, several or None, by the names of their options."""
        raise NotImplementedError

    def at_out(self) -> list[Path]:
        """The file that --out names, or those that its folder gets."""
        return [path for _, path in each_path({"out": self.outputs()["out"]})]

    def written(self) -> list[Path]:
        """The files that are written; standard output is none."""
        return [path for _, path in each_path(self.outputs()) if str(path) != "-"]

    def deciding(self) -> dict[str, Any]:
        """The options that decide what the rows hold: an unfinished run goes on with the same ones only."""
        return {name: getattr(self, name) for name in DECIDING}


@dataclass(frozen=True)
class ScoreConfig(TextOptions):
    """Options of `logitless score`; the command line mirrors them. Raises OptionError from `check`."""

    out: Path | None = None
    """The parquet file to write, a row per token. Default: NAME.scores.parquet for --data NAME, in this directory."""
    documents: Path | None = None
    """Write a line of JSON per document to this file too: tokens, bytes, perplexity."""
    keep: Keep = 10
    store: Literal["topk", "hidden"] = "topk"
    """What is kept of each distribution: its --keep best entries, or in their place the last hidden state, with the
    model's head once in a file beside --out: the whole distribution, as `logitless train --teacher` reads it."""
    hidden_dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    """Of hidden states that are stored. fp8: e4m3, with a scale for each token."""

    def check(self) -> ScoreConfig:
        """Itself, or OptionError for the first value without a meaning."""
        self.check_text()
        if self.place.is_char_device():
            raise OptionError(f"--out {self.place}: expected a file, beside which parts are collected, got a device")
        if self.store == "topk" and self.hidden_dtype != "bfloat16":
            raise OptionError(f"--hidden-dtype {self.hidden_dtype} is of --store hidden: give that, or leave it out")
        if self.store == "hidden" and self.keep != ScoreConfig.keep:
            raise OptionError(f"--keep {self.keep} is of --store topk: give that, or leave it out")
        self.check_files(self.place.parent, (escape(parts_of(self.place).name),), self.outputs())
        if self.place.suffix.lower() in OTHER_FORMATS:
            raise OptionError(f"--out {self.place}: rows are written as parquet; give a name that ends in .parquet")
        return self

    @property
    def place(self) -> Path:
        return self.out or named_after(self.data, "scores.parquet")

    @property
    def head_place(self) -> Path:
        """Where the head of hidden states goes."""
        return self.place.with_name(f"{self.place.name.removesuffix('.parquet')}.head.safetensors")

    def outputs(self) -> dict[str, Any]:
        head = {"out's head": self.head_place} if self.store == "hidden" else {}
        return {"out": self.place, "documents": self.documents, "json": self.json, **head}

    def deciding(self) -> dict[str, Any]:
        kept = {"keep": self.keep} if self.store == "topk" else {"hidden_dtype": self.hidden_dtype}
        return {**super().deciding(), "store": self.store, **kept}


def parts_of(place: Path) -> Path:
    """The folder beside a file that is written, with its parts until all are there."""
    return place.parent / f"{place.name}.parts"


def named_after(data: str | None, ending: str) -> Path:
    """What is written by default, in this directory, of --data: its name, without what says that it is text."""
    path = Path(os.path.abspath(data or ""))  # `.` has a name, and a symlink keeps its own
    is_text = path.suffix.lower() in SUFFIXES and not path.is_dir()
    return Path(f"{path.stem if is_text else path.name}.{ending}")
