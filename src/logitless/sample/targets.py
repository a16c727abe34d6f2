"""Sparse records of a teacher, as `logitless score` writes them, read back as what distillation trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError
from .teacher import TeacherRecord

IGNORED = -100


@dataclass(frozen=True, eq=False)
class TeacherTargets:
    """One document, or some of them padded: what the student reads, and the teacher's distribution of what comes next.

    At each position: input_ids (..., T) int64; labels (..., T) int64, the token that came, -100 in the place of
    padding and where none was scored; ids (..., T, K) int64, the teacher's best entries, and weights (..., T, K) fp32,
    their probabilities, which lack of 1 what the teacher gave to all others.
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
        """1 where there is text, (..., T) int64: up to the last label."""
        return (self.labels != IGNORED).long().flip(-1).cummax(-1).values.flip(-1)


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
    renormalised, and what the K entries leave to others is known. What the teacher had before a text, the student has,
    too, without a label but at its last token. A document with a token that has no score, other than its first, is
    passed over.
    Raises DataError for a file that is no such record, is damaged or holds no best entries; ConfigError without
    pyarrow. Memory: some row groups and a document.
    """
    record = TeacherRecord(path)
    if record.kind != "topk":
        remedy = "score without --store hidden, or read it with TeacherRecord"
        raise DataError(f"{path}: expected best entries, got hidden states: {remedy}")
    unread = int(not record.opening)  # a first token without another before it: the student is asked for none there
    silent = max(0, len(record.opening) - 1)  # tokens behind which the opening goes on
    for first, token, scored in record.documents():
        if not scored[unread:].all() or len(token) == unread:
            continue
        rows = vars(record.read(first + unread, first + len(token)))
        before = torch.from_numpy(np.concatenate([record.opening, token[:-1]]).astype(np.int64))
        labels = F.pad(torch.from_numpy(token[unread:]), (silent, 0), value=IGNORED)
        best = (F.pad(x, (0, 0, silent, 0)) for x in (rows["ids"], rows["log_weights"].exp()))
        yield TeacherTargets(before, labels, *best)
