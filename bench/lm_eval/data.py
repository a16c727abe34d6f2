"""The documents of a task, for lm-evaluation-harness, which reads this file by its path."""

from pathlib import Path
from typing import Any

from datasets import Dataset


def read(task: str, **_: Any) -> dict[str, Dataset]:
    """{split: documents} of a task whose file lies beside this one."""
    return {"test": Dataset.from_json(str(Path(__file__).with_name(f"{task}.jsonl")))}  # pyright: ignore[reportReturnType]


def cloze(**_: Any) -> dict[str, Dataset]:
    return read("cloze")


def choice(**_: Any) -> dict[str, Dataset]:
    return read("choice")


def text(**_: Any) -> dict[str, Dataset]:
    return read("text")
