"""What a model says of each token of its answers, a line of JSON an answer, written as the answers come."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import hash_args  # pyright: ignore[reportMissingImports]

from ..errors import DataError
from ..hashes import hash_of
from ..sample.record import SampleRecord

KEPT = 5  # best entries of each generated token
TOKENS = ("logprob", "rank", "entropy")  # of a generated token
SCORED = (*TOKENS, "confidence")
HASH = b', "hash": "'  # of the line before it, which nothing else follows


class Records:
    """A file of records, which is appended to: a line is whole before the harness keeps its answer.

    A line has the task, the document's number in it, the request's number there and its type; `tokens` and `ids`, with
    the logprob, rank, entropy (nats) and confidence (the best entry's probability) of each; `cut`, the tokens of its
    context that the model did not see. A generated text is there too, with the best entries of each token, and sampled
    tokens have the log-prob that they were drawn with. `answer` is what the harness gets, `key` is the same for the
    same question, and `hash` is of the line before it.
    """

    def __init__(self, path: str | Path, tokenizer: Any) -> None:
        self.path, self.tokenizer = Path(path), tokenizer
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            check_file(self.path)
            if not self.path.read_bytes().endswith(b"\n"):
                self._append(b"\n")  # the end of a line that was never whole

    def write(self, instance: Any, ids: Sequence[int], cut: int, values: dict[str, Any], answer: Any) -> None:
        """The record of one answer; `values` has a list of numbers for each name, and may have the text."""
        line = {
            "task": instance.task_name,
            "document": instance.doc_id,
            "request": instance.idx,
            "type": instance.request_type,
            "cut": cut,
            "ids": list(ids),
            "tokens": self.tokenizer.convert_ids_to_tokens(list(ids)),
            **values,
            "answer": answer,
            "key": hash_args(instance.request_type, instance.args),
        }
        self._append(_sealed(json.dumps(line).encode()))

    def _append(self, line: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(line)


def generated(record: SampleRecord) -> tuple[list[int], dict[str, Any]]:
    """(ids, numbers) of one generated sequence (T,)."""
    written = record[(record.token >= 0).nonzero().squeeze(1)]
    best = (written.topk_logits[:, 0] - written.logsumexp).exp()
    values = {name: getattr(written, name).tolist() for name in TOKENS} | {"confidence": best.tolist()}
    if bool((written.temperature > 0).any()):
        values["behaviour_logprob"] = written.behaviour_logprob.tolist()
    values |= {"top_ids": written.topk_ids.tolist(), "top_logprobs": written.topk_logprob.tolist()}
    return written.token.tolist(), values


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(where its line begins, record) of each line; None for one that a kill left unfinished, or that was changed."""
    check_file(path)
    with path.open("rb") as file:
        start = 0
        for line in file:
            known = line.rpartition(HASH)[0] + b"}"
            yield start, json.loads(known) if _sealed(known) == line else None
            start += len(line)


def check_file(path: Path) -> None:
    """DataError for what is no file, such as a pipe, which may never end."""
    if not path.is_file():
        raise DataError(f"{path}: expected a file of records, got a folder, a device or a pipe: remove it")


def _sealed(line: bytes) -> bytes:
    """A line of JSON with its hash, by which one that was changed is told."""
    return line.removesuffix(b"}") + HASH + hash_of(line).encode() + b'"}\n'
