"""A block: which documents are scored together, and what is told of them meanwhile."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from logitless.workbench.scoring import block as module
from logitless.workbench.scoring.block import Measure, Scorer, blocks, score_block
from logitless.workbench.scoring.documents import Piece
from logitless.workbench.sources.tokenizer import pretrained


def test_blocks_are_of_about_one_size(monkeypatch):
    """A document counts for 64 characters beside its text, so that empty ones end a block too."""
    monkeypatch.setattr(module, "PIECE", 400)
    texts = ["x" * 336, *[""] * 7, "x" * 335, ""]
    found = list(blocks(Piece(i, "", text) for i, text in enumerate(texts)))
    assert [[piece.document for piece in block] for block in found] == [[0], [*range(1, 8)], [8, 9]]
    chats = [Piece(i, "", chat={"messages": "x" * 400}) for i in range(2)]
    assert [len(block) for block in blocks(chats)] == [1, 1]


def test_what_is_told_while_a_block_is_scored(micro):
    """Tokens with a score, of which a document's first has none; and the share of what is fed."""

    def read(inputs, at, labels):
        return {"logsumexp": torch.zeros(len(labels)), "logprob": -torch.ones(len(labels))}

    measure = Measure(dict.fromkeys(("logsumexp", "logprob"), (np.float32, ())), read)
    subject = SimpleNamespace(tokenizer=pretrained(str(micro)), device=torch.device("cpu"), context=64)
    told = []
    texts = ["a" * 31, "b" * 21, "c", "", "d" * 11]
    scored = score_block(
        Scorer(subject, 32, (), 30, measure),
        [Piece(i, "", text, problem="" if text else "empty") for i, text in enumerate(texts)],
        lambda tokens, share: told.append((tokens, share)),
    )
    assert told == [(30, 0.5), (20, pytest.approx(50 / 60)), (10, 1.0)]
    assert [piece["scored"] for piece in scored.pieces] == [30, 20, 0, 0, 10]
    assert repr([piece["nats"] for piece in scored.pieces]) == "[30.0, 20.0, 0.0, 0.0, 10.0]"  # -0.0 of none
    assert [piece["bytes"] for piece in scored.pieces] == [30, 20, 0, 0, 10]
