"""Sparse records of a teacher, as `logitless score` writes them, read back as what distillation trains on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow

IGNORED = -100
COLUMNS = ["document", "token", "logsumexp", "topk_ids", "topk_logits"]


@dataclass(frozen=True, eq=False)
class TeacherTargets:
    """One document, or some of them padded: what the student reads, and the teacher's distribution of what comes next.

    At each position: input_ids (..., T) int64; labels (..., T) int64, the token that came, -100 in the place of
    padding; ids (..., T, K) int64, the teacher's best entries, and weights (..., T, K) fp32, their probabilities,
    which lack of 1 what the teacher gave to all others.
    """

    input_ids: Tensor
    labels: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def stack(cls, documents: Sequence[TeacherTargets]) -> TeacherTargets:
        """Several documents as one batch (B, T), padded on the right: input_ids 0, weights 0."""

        def padded(name: str, fill: float) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                [getattr(d, name) for d in documents], batch_first=True, padding_value=fill
            )

        return cls(padded("input_ids", 0), padded("labels", IGNORED), padded("ids", 0), padded("weights", 0.0))

    @property
    def attention_mask(self) -> Tensor:
        """1 where there is text, (..., T) int64."""
        return (self.labels != IGNORED).long()


def read_targets(path: str | Path) -> Iterator[TeacherTargets]:
    """The documents of a file that `logitless score` wrote, one after the other; the file is streamed.

        for target in read_targets("teacher.parquet"):
            hidden = logitless.hidden_states(student, {"input_ids": target.input_ids[None]})[0]
            loss = logitless.token_loss(
                lambda s, w: losses.soft_targets(
                    s.candidate_logits, s.logsumexp, w, tail_logprob=s.tail_logprob
                ),
                hidden, logitless.LMHead.of(student), target.labels,
                want=("logsumexp", "tail_logprob"), candidates=target.ids, inputs=(target.weights,),
            )

    A weight is exp(logit - log-sum-exp) with the log-sum-exp of the teacher's whole distribution: nothing is
    renormalised, and what the K entries leave to others is known. Where the teacher had a begin-of-text token in
    front, so has the student. A document with a token that has no score, other than its first, is passed over.
    Raises DataError for a file that is no such record, or holds no best entries; ConfigError without pyarrow.
    Memory: a row group and a document.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError("read_targets: expected pyarrow, which is not installed; pip install pyarrow") from None
    try:
        with pq.ParquetFile(path) as file:
            metadata = json.loads((file.schema_arrow.metadata or {}).get(b"logitless", b"{}"))
            if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
                raise DataError(
                    f"{path}: expected what logitless score --keep 1 or more writes, got no column {', '.join(missing)}"
                )
            rows = (file.read_row_group(i, columns=COLUMNS) for i in range(file.num_row_groups))
            for columns in _documents(rows):
                target = _target(columns, metadata.get("bos"))
                if target is not None:
                    yield target
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None


Columns = dict[str, np.ndarray]


def _documents(tables: Iterator[pyarrow.Table]) -> Iterator[Columns]:
    """The rows of each document, from row groups that may end within one."""
    pending: list[Columns] = []
    for table in tables:
        columns = _arrays(table)
        document = columns["document"]
        edges = [0, *(np.flatnonzero(np.diff(document)) + 1).tolist(), len(document)]
        for begin, end in pairwise(edges):
            part = {name: x[begin:end] for name, x in columns.items()}
            if pending and begin < end and pending[-1]["document"][0] != part["document"][0]:
                yield _joined(pending)
                pending = []
            pending.append(part)
    if pending:
        yield _joined(pending)


def _joined(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}


def _arrays(table: pyarrow.Table) -> Columns:
    """The columns with NaN, and id 0, where a token has no score."""
    out: Columns = {name: table[name].to_numpy() for name in ("document", "token", "logsumexp")}
    for name in ("topk_ids", "topk_logits"):
        lists: Any = table[name].combine_chunks()
        out[name] = lists.values.to_numpy(zero_copy_only=False).reshape(table.num_rows, -1)
    return out


def _target(columns: Columns, bos: int | None) -> TeacherTargets | None:
    scored = np.isfinite(columns["logsumexp"].astype(np.float64))
    start = [] if bos is None else [bos]
    first = 1 - len(start)
    if not scored[first:].all() or len(scored) == first:
        return None
    token = columns["token"].astype(np.int64)
    before = np.array([*start, *token[:-1]])
    logits = columns["topk_logits"][first:].astype(np.float32)
    weights = np.exp(logits - columns["logsumexp"][first:, None].astype(np.float32))
    given = before.astype(np.int64), token[first:], columns["topk_ids"][first:].astype(np.int64), weights
    return TeacherTargets(*(torch.from_numpy(np.ascontiguousarray(x)) for x in given))
