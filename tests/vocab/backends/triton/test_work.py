"""How much the kernels do, as the interpreter counts it: rows that follow one another, and noise."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from logitless.vocab.backends import rows as plain_rows
from logitless.vocab.noise import Noise
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

    made, join = [], InterpreterBuilder.create_join  # of the four words of a block
    with patch.object(InterpreterBuilder, "create_join", lambda *a, **k: made.append(1) or join(*a, **k)):
        drawn(operands((3,), 5, 301, dtype=torch.float32, bias=False), temperature=temperature)
    assert bool(made) == bool(temperature)


@pytest.mark.parametrize(("deviation", "most"), [(2.0, 0.05), pytest.param(0.0, 0.5, marks=pytest.mark.slow)])
def test_exact_noise_is_made_in_few_blocks(deviation, most):
    """A row of the GPU benchmark's size, in its 50 parts of 12 blocks: none but entries that may win get their noise.

    Where all logits are equal the best 32 bound it least: each part then finds a better entry a few times.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    from logitless.sample import triton_draw

    quotients, divide = [], InterpreterBuilder.create_fdiv

    def counted(self, x, y):
        quotients.append(x.data.size if x.data.dtype == "float64" else 0)
        return divide(self, x, y)

    z, one = torch.randn(1, 151_936) * deviation, torch.ones(1)
    best, ids = z.topk(64)
    chunk: Any = SimpleNamespace(materialised=[SimpleNamespace(z=z)], may_be_infinite=False)
    noise = Noise(torch.arange(1), torch.zeros(1, dtype=torch.int64))
    sizes = patch.multiple(triton_draw, PROGRAMS=50, BLOCK=1024)  # larger blocks: the interpreter is quicker
    with sizes, patch.object(InterpreterBuilder, "create_fdiv", counted):
        look = triton_draw._Look(chunk, best[:, 0], one, noise, best, ids, True)
    exact = sum(quotients) / 2  # entries: of each a logarithm of a logarithm
    assert look.parts == 50
    assert 1 <= exact <= most * 594
    assert look.places[0, look.noisy[0].argmax()] == (z + noise.gumbel(slice(0, 151_936)))[0].argmax()
