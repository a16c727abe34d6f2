"""Sparse records of a teacher, as `logitless score` writes them, read back as what distillation trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .teacher import TeacherRecord

IGNORED = -100


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
    Raises DataError for a file that is no such record, is damaged or holds no best entries; ConfigError without
    pyarrow. Memory: some row groups and a document.
    """
    record = TeacherRecord(path)
    if record.kind != "topk":
        remedy = "score without --store hidden, or read it with TeacherRecord"
        raise DataError(f"{path}: expected best entries, got hidden states: {remedy}")
    start = [] if record.bos is None else [record.bos]
    unread = 1 - len(start)  # a first token without another before it: the student is asked for none there
    for first, token, scored in record.documents():
        if not scored[unread:].all() or len(token) == unread:
            continue
        rows = vars(record.read(first + unread, first + len(token)))
        before = torch.from_numpy(np.concatenate([start, token[:-1]]).astype(np.int64))
        yield TeacherTargets(before, torch.from_numpy(token[unread:]), rows["ids"], rows["log_weights"].exp())
