"""Calls that are added up in registers, whatever the processor and their size."""

import pytest

from logitless.vocab.backends import logits
from logitless.vocab.backends.compiled import stream


@pytest.fixture
def streamed(monkeypatch):
    """Any processor, and any number of tokens; how many chunks were accumulated so."""
    chunks = []
    accumulate = stream.accumulate
    monkeypatch.setattr(stream, "is_intel", lambda: False)
    monkeypatch.setattr(logits, "has_bf16_tiles", lambda x: False)
    monkeypatch.setattr(stream, "FEW", 1)
    monkeypatch.setattr(
        stream, "accumulate", lambda chunk, *how: chunks.append(chunk.n_tokens) or accumulate(chunk, *how)
    )
    return chunks


@pytest.fixture
def held(streamed, monkeypatch):
    """The most bytes of buffers that a chunk had, so far."""
    accumulate, buffers = stream.accumulate, []
    monkeypatch.setattr(
        stream, "accumulate", lambda chunk, *how: buffers.append(chunk.scratch.buffers) or accumulate(chunk, *how)
    )
    return lambda: max(sum(x.nbytes for x in found.values()) for found in buffers)
