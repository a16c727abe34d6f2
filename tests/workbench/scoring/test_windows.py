"""Every token once, with the context that its window promises."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitless.workbench.scoring.windows import Batch, Tokens, Window, batches, windows


@given(st.integers(0, 60), st.integers(2, 20), st.integers(1, 20), st.integers(0, 25))
def test_every_token_is_scored_once_and_no_window_is_too_long(n, context, stride, before):
    stride, before = min(stride, context), min(before, context + 1 - min(stride, context))
    found = list(windows(Tokens(np.arange(before + n), before), 0, context, stride))
    scored = [i for w in found for i in range(w.new, w.end)]
    assert scored == list(range(max(1, before), before + n))
    for i, w in enumerate(found):
        assert w.fed <= context
        assert w.start < w.new < w.end
        seen = w.new - w.start
        assert seen == w.new if w.start == 0 else seen >= context + 1 - stride
        assert i == 0 or w.end - w.new == (stride if i < len(found) - 1 else min(stride, w.end - w.new))


def test_an_opening_that_is_longer_than_the_context():
    found = list(windows(Tokens(np.arange(9), 6), 0, 4, 2))
    assert [i for w in found for i in range(w.new, w.end)] == [6, 7, 8]
    assert all(w.fed <= 4 for w in found)


def test_batches_hold_windows_of_one_length_and_keep_to_their_size():
    lengths = [3, 40, 7, 7, 90, 12, 3, 41]
    found = [w for i, n in enumerate(lengths) for w in windows(Tokens(np.arange(n), 0), i, 64, 32)]
    grouped = list(batches(found, 48))
    assert sorted((w.piece, w.start) for b in grouped for w in b) == [(w.piece, w.start) for w in found]
    for batch in grouped:
        assert len(batch) == 1 or len(batch) * max(w.fed for w in batch) <= 48
    longest = [max(w.fed for w in b) for b in grouped]
    assert longest == sorted(longest, reverse=True)
    assert list(batches([], 48)) == []
    eights = [Window(i, 0, 1, 9) for i in range(5)]  # of which 8 are fed
    assert [len(batch) for batch in batches(eights, 16)] == [2, 2, 1]


def test_a_window_of_which_nothing_is_scored_is_not_fed():
    """As of a long question in a conversation."""
    said = np.zeros(30, dtype=bool)
    said[[2, 3, 28]] = True
    found = list(windows(Tokens(np.arange(30), 0, said), 0, 8, 4))
    assert [(w.new, w.end) for w in found] == [(1, 9), (25, 29)]


@pytest.mark.parametrize("before", [0, 2])
def test_a_batch_feeds_what_its_scores_are_for(before):
    """A model that knows nothing but the position it is at would give each row the token that comes next."""
    pieces = [Tokens(100 + np.arange(before + 11), before), Tokens(200 + np.arange(before + 3), before)]
    rows = [0, 11]
    seen: dict[int, tuple[int, int, int]] = {}
    found = [w for i, t in enumerate(pieces) for w in windows(t, i, 5, 3)]
    for some in batches(found, 12):
        batch = Batch.of(some, pieces, rows, torch.device("cpu"))
        ids = batch.inputs["input_ids"]
        assert ids.shape == batch.inputs["attention_mask"].shape
        at = ids[batch.at]
        assert batch.inputs["attention_mask"][batch.at].all()
        for row, last, label, context in zip(
            batch.rows, at.tolist(), batch.labels.tolist(), batch.context, strict=True
        ):
            assert row not in seen
            seen[int(row)] = last, label, int(context)
    for piece, first, n in ((0, 0, 11), (1, 11, 3)):
        base = 100 * (piece + 1) + before
        for i in range(0 if before else 1, n):
            last, label, context = seen[first + i]
            assert (last, label) == (base + i - 1, base + i)
            assert 1 <= context <= 5
    assert len(seen) == 14 - (0 if before else 2)
