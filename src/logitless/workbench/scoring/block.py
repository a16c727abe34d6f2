"""A block: the documents that are tokenised, sorted by length, scored and written together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError
from ...sample.text import byte_count
from ..sources.chat import example
from ..sources.corpus import Row
from ..sources.model import ModelSource
from ..sources.tokenizer import TemplateError, TextTokenizer, UnreadError
from .documents import PIECE, Piece
from .windows import Batch, Tokens, batches, windows

OF_A_DOCUMENT = 64  # characters that one counts for beside its text: empty ones take memory too
# Of a document whose scores by a model are no numbers, by that model's option.
NOT_FINITE = {"model": "its scores are not finite", "against": "its scores by --against are not finite"}
PLACES = ("document", "position", "context", "token")  # columns that a token without a score has, too
Rows = Mapping[str, np.ndarray]  # columns by name
Reading = Callable[[dict[str, Tensor], tuple[Tensor, Tensor], Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Measure:
    """What is known of each token beside its place, as columns, and of each document.

    `columns` says of which type and of how many entries a row each is; logsumexp and logprob are among them. `read`
    takes a batch's inputs, the rows and positions (n,) that are scored there, and their labels (n,). `sums` adds up
    what else a document has, of its scored rows. A document with a `finite` column that is not has no scores: it says
    which model's fault that is, by its option.
    """

    columns: Mapping[str, tuple[type[np.generic], tuple[int, ...]]]
    read: Reading
    sums: Callable[[Rows], dict[str, float]] = lambda rows: {}
    finite: Mapping[str, str] = field(default_factory=lambda: {"logsumexp": "model"})
    others: Mapping[str, ModelSource] = field(default_factory=dict)  # models beside the scorer's, by their options


@dataclass(frozen=True)
class Subject:
    """A model that text goes through, with its tokenizer; `context` tokens are fed at most."""

    model: Any
    source: ModelSource
    tokenizer: TextTokenizer
    device: torch.device
    context: int


@dataclass(frozen=True)
class Scorer:
    """A model, how text goes through it, and what is measured there."""

    subject: Subject
    stride: int
    opening: tuple[int, ...]  # the ids that are put before each text
    batch_tokens: int
    measure: Measure

    def tokens(self, pieces: list[Piece]) -> list[Tokens]:
        """The pieces' tokens, each behind the opening or the end of the piece before."""
        found = self._encoded(["" if p.problem else p.text for p in pieces])
        leads = self._encoded([p.lead for p in pieces]) if any(p.lead for p in pieces) else [[]] * len(pieces)
        out = []
        for piece, ids, lead in zip(pieces, found, leads, strict=True):
            if piece.chat is not None:
                out.append(self._conversation(piece.chat, piece.name))
                continue
            if isinstance(ids, str) or isinstance(lead, str):
                out.append(_none_for(ids if isinstance(ids, str) else str(lead)))
                continue
            start = [] if piece.lead or not ids else self.opening
            before = [*start, *lead[-(self.subject.context + 1 - self.stride) :]]
            out.append(Tokens(np.array([*before, *ids], dtype=np.int64), len(before)))
        return out

    def _encoded(self, texts: list[str]) -> list[list[int] | str]:
        """The ids of each text, or why the tokenizer cannot read it."""
        try:
            return [*self.subject.tokenizer.encode(texts)]
        except UnreadError as error:  # of one of them
            if len(texts) == 1:
                return [str(error)]
        return [found for text in texts for found in self._encoded([text])]

    def _conversation(self, row: Row, name: str) -> Tokens:
        """A whole conversation as the chat template has it. Raises ConfigError where there is no template."""
        try:
            found = example(row, self.subject.tokenizer, name)
        except (DataError, TemplateError, UnreadError) as error:  # of this conversation: others may be of another form
            return _none_for(str(error).removeprefix(f"--data {name}: "))
        return Tokens(found.ids.astype(np.int64), 0, found.said)


def _none_for(problem: str) -> Tokens:
    """The tokens of a piece that is skipped."""
    return Tokens(np.zeros(0, dtype=np.int64), 0, problem=problem)


@dataclass
class Scored:
    """A block's rows, in the order of its documents, and of each piece its sums, and `why` it is skipped."""

    columns: dict[str, np.ndarray]
    scored: np.ndarray  # (n,) bool: a first token with nothing before it has no score
    pieces: list[dict[str, Any]]


def blocks(documents: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The documents in blocks of about `PIECE` characters: the same ones on every rank and after every stop."""
    block: list[Piece] = []
    size = 0
    for piece in documents:
        block.append(piece)
        size += len(piece.text if piece.chat is None else str(piece.chat)) + OF_A_DOCUMENT
        if size >= PIECE:
            yield block
            block, size = [], 0
    if block:
        yield block


def score_block(scorer: Scorer, block: list[Piece], tick: Callable[[int, float], None]) -> Scored:
    """Scores the pieces of a block; `tick` hears after each batch how many tokens it scored, and the share done."""
    tokens = scorer.tokens(block)
    first_rows = [0, *accumulate(t.rows for t in tokens)]
    columns, scored = _columns(tokens, block, scorer.measure)
    found = [w for i, t in enumerate(tokens) for w in windows(t, i, scorer.subject.context, scorer.stride)]
    all_fed, fed = sum(w.fed for w in found), 0
    for some in batches(found, scorer.batch_tokens):
        batch = Batch.of(some, tokens, first_rows, scorer.subject.device)
        found_here = scorer.measure.read(batch.inputs, batch.at, batch.labels)
        columns["context"][batch.rows] = batch.context
        scored[batch.rows] = True
        for name in scorer.measure.columns:
            columns[name][batch.rows] = found_here[name].cpu().numpy()
        fed += sum(w.fed for w in some)
        tick(len(batch.rows), fed / all_fed)
    known = [
        _known(scorer, piece, part, columns, scored, slice(begin, end))
        for piece, part, (begin, end) in zip(block, tokens, pairwise(first_rows), strict=True)
    ]
    return Scored(columns, scored, known)


def _columns(tokens: list[Tokens], pieces: list[Piece], measure: Measure) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Room for the rows of a block."""
    rows = [t.rows for t in tokens]
    n = sum(rows)
    columns = {
        "document": np.repeat(np.array([p.document for p in pieces], dtype=np.int64), rows),
        "position": np.concatenate([np.arange(r, dtype=np.int32) for r in rows] or [np.zeros(0, np.int32)]),
        "context": np.zeros(n, dtype=np.int32),
        "token": np.concatenate([t.ids[t.before :] for t in tokens] or [np.zeros(0)]).astype(np.int32),
    }
    columns |= {name: np.zeros((n, *shape), dtype=dtype) for name, (dtype, shape) in measure.columns.items()}
    return columns, np.zeros(n, dtype=bool)


def _known(
    scorer: Scorer, piece: Piece, tokens: Tokens, columns: dict[str, np.ndarray], scored: np.ndarray, rows: slice
) -> dict[str, Any]:
    """A piece's sums; one whose scores are no numbers keeps its rows, without scores."""
    why = piece.problem or tokens.problem or ("" if rows.start < rows.stop else "no token in it")
    strange = [model for name, model in scorer.measure.finite.items() if not np.isfinite(columns[name][rows]).all()]
    if strange:
        why, scored[rows] = NOT_FINITE[strange[0]], False
    whole = tokens.said is None  # of a conversation the bytes are those of the answers alone
    other = columns["token"][rows][~scored[rows] if whole else scored[rows]].tolist()
    size = byte_count(scorer.subject.tokenizer.saved, other)
    size = len(piece.text.encode()) - size if whole else size
    count = int(scored[rows].sum())
    size = max(0, size) if count else 0  # a text that is passed over has no bits, and no bytes either
    with_scores = {name: x[rows][scored[rows]] for name, x in columns.items()}
    nats = 0.0 - float(with_scores["logprob"].sum(dtype=np.float64))  # of none not -0.0
    sums = {"rows": rows.stop - rows.start, "scored": count, "nats": nats, "bytes": size}
    sums |= scorer.measure.sums(with_scores)
    return {"document": piece.document, "name": piece.name, **sums, **({"why": why} if why else {})}
