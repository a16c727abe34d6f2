"""How much the kernels do, as the interpreter counts it: rows that follow one another, and noise."""

from unittest.mock import patch

import pytest
import torch

from logitless.vocab.backends import rows as plain_rows
from tests.support.vocab.comparing import operands
from tests.support.vocab.triton_calls import drawn

triton_rows = pytest.importorskip("logitless.vocab.backends.triton.rows")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="counted by the interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def test_rows_of_one_label_are_read_several_at_a_time():
    """A row after another is a wait for memory each."""
    from triton.runtime.interpreter import InterpreterBuilder

    weights, x, ids = torch.randn(64, 1), torch.randn(64, 24), torch.full((64, 1), 3)
    reads, load = [], InterpreterBuilder.create_masked_load
    into, expected = torch.zeros(5, 24), torch.zeros(5, 24)
    with patch.object(InterpreterBuilder, "create_masked_load", lambda *a, **k: reads.append(1) or load(*a, **k)):
        triton_rows.scatter(weights, x, ids, into)
    plain_rows.scatter(weights, x, ids, expected)
    torch.testing.assert_close(into, expected, rtol=1e-5, atol=1e-5)
    begun = 2 * 64  # each place looks at itself and at the one before
    assert len(reads) - begun < 64  # and so many follow


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_greedy_row_makes_no_noise(temperature):
    from triton.runtime.interpreter import InterpreterBuilder

    made, multiply = [], InterpreterBuilder.create_umulhi  # of Philox's rounds
    with patch.object(InterpreterBuilder, "create_umulhi", lambda *a, **k: made.append(1) or multiply(*a, **k)):
        drawn(operands((3,), 5, 301, dtype=torch.float32, bias=False), temperature=temperature)
    assert bool(made) == bool(temperature)
