"""The comparison with float64: every statistic has its row, and the pass's errors are at most plain torch's."""

import pytest

from bench import precision


@pytest.mark.parametrize("dtype", precision.DTYPES)
def test_every_statistic_has_a_row(dtype, monkeypatch):
    monkeypatch.setattr(precision, "TOKENS", 8)
    monkeypatch.setattr(precision, "HIDDEN", 64)
    monkeypatch.setattr(precision, "VOCAB", 4096)
    rows = list(precision.statistics_of(dtype))
    assert tuple(row["name"] for row in rows) == precision.WANTED
    for row in rows:
        assert row["error"] <= row["plain_error"] + 5e-6, row
