"""A block: the documents that are tokenised, sorted by length, scored and written together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from ...integrations.transformers.scoring import token_scores
from ..sources.tokenizer import TextTokenizer
from .documents import PIECE, Piece
from .windows import Batch, Tokens, batches, windows

OF_A_DOCUMENT = 64  # characters that one counts for beside its text: empty ones take memory too
COLUMNS = {  # of the record's names: the pass's, and what holds them
    "token_logit": ("label_logit", np.float32),
    "logprob": ("logprob", np.float32),
    "rank": ("rank", np.int32),
    "logsumexp": ("logsumexp", np.float32),
    "mean_logit": ("mean_logit", np.float32),
    "entropy": ("entropy", np.float32),
    "self_certainty": ("self_certainty", np.float32),
    "topk_ids": ("top_k_ids", np.int32),
    "topk_logits": ("top_k_logits", np.float32),
}


@dataclass(frozen=True)
class Scorer:
    """A model with its tokenizer and what `logitless score` was told."""

    model: Any
    tokenizer: TextTokenizer
    device: torch.device
    keep: int
    context: int
    stride: int
    bos: int | None  # the id that is put before each document
    batch_tokens: int
    memory_budget: int

    def tokens(self, pieces: list[Piece]) -> list[Tokens]:
        """The pieces' tokens, each behind the begin-of-text token or the end of the piece before."""
        found = self.tokenizer.encode(["" if p.problem else p.text for p in pieces])
        leads = self.tokenizer.encode([p.lead for p in pieces]) if any(p.lead for p in pieces) else [[]] * len(pieces)
        out = []
        for piece, ids, lead in zip(pieces, found, leads, strict=True):
            start = [] if piece.lead or self.bos is None or not ids else [self.bos]
            before = [*start, *lead[-(self.context + 1 - self.stride) :]]
            out.append(Tokens(np.array([*before, *ids], dtype=np.int64), len(before)))
        return out


@dataclass
class Scored:
    """A block's rows, in the order of its documents, and of each piece its sums, and `why` it is skipped."""

    columns: dict[str, np.ndarray]
    scored: np.ndarray  # (n,) bool: a first token without a begin-of-text token has no score
    pieces: list[dict[str, Any]]


def blocks(documents: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The documents in blocks of about `PIECE` characters: the same ones on every rank and after every stop."""
    block: list[Piece] = []
    size = 0
    for piece in documents:
        block.append(piece)
        size += len(piece.text) + OF_A_DOCUMENT
        if size >= PIECE:
            yield block
            block, size = [], 0
    if block:
        yield block


def score_block(scorer: Scorer, block: list[Piece], tick: Callable[[int, float], None]) -> Scored:
    """Scores the pieces of a block; `tick` hears after each batch how many tokens it scored, and the share done."""
    tokens = scorer.tokens(block)
    first_rows = [0, *accumulate(t.rows for t in tokens)]
    columns, scored = _columns(tokens, block, scorer.keep)
    found = [w for i, t in enumerate(tokens) for w in windows(t, i, scorer.context, scorer.stride)]
    all_fed, fed = sum(w.fed for w in found), 0
    for some in batches(found, scorer.batch_tokens):
        batch = Batch.of(some, tokens, first_rows, scorer.device)
        stats, _ = token_scores(
            scorer.model, batch.inputs, batch.at, batch.labels, keep=scorer.keep, memory_budget=scorer.memory_budget
        )
        columns["context"][batch.rows] = batch.context
        scored[batch.rows] = True
        for name, (theirs, _) in COLUMNS.items():
            if name in columns:
                columns[name][batch.rows] = getattr(stats, theirs).cpu().numpy()
        fed += sum(w.fed for w in some)
        tick(len(batch.rows), fed / all_fed)
    known = [
        _known(scorer, piece, columns, scored, slice(begin, end))
        for piece, (begin, end) in zip(block, pairwise(first_rows), strict=True)
    ]
    return Scored(columns, scored, known)


def _columns(tokens: list[Tokens], pieces: list[Piece], keep: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Room for the rows of a block."""
    rows = [t.rows for t in tokens]
    n = sum(rows)
    columns = {
        "document": np.repeat(np.array([p.document for p in pieces], dtype=np.int64), rows),
        "position": np.concatenate([np.arange(r, dtype=np.int32) for r in rows] or [np.zeros(0, np.int32)]),
        "context": np.zeros(n, dtype=np.int32),
        "token": np.concatenate([t.ids[t.before :] for t in tokens] or [np.zeros(0)]).astype(np.int32),
    }
    for name, (_, dtype) in COLUMNS.items():
        if not name.startswith("topk"):
            columns[name] = np.zeros(n, dtype=dtype)
        elif keep:
            columns[name] = np.zeros((n, keep), dtype=dtype)
    return columns, np.zeros(n, dtype=bool)


def _known(
    scorer: Scorer, piece: Piece, columns: dict[str, np.ndarray], scored: np.ndarray, rows: slice
) -> dict[str, Any]:
    """A piece's sums; one whose scores are no numbers keeps its rows, without scores."""
    why = piece.problem or ("" if rows.start < rows.stop else "no token in it")
    if not np.isfinite(columns["logsumexp"][rows]).all():
        why, scored[rows] = "its scores are not finite", False
    unscored = columns["token"][rows][~scored[rows]].tolist()
    size = len(piece.text.encode()) - len(scorer.tokenizer.saved.decode(unscored).encode())
    nats = -float(columns["logprob"][rows][scored[rows]].sum(dtype=np.float64))
    sums = {"rows": rows.stop - rows.start, "scored": int(scored[rows].sum()), "nats": nats, "bytes": max(0, size)}
    return {"document": piece.document, "name": piece.name, **sums, **({"why": why} if why else {})}
