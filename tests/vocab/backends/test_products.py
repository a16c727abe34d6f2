"""Products of some rows, which a CPU computes in columns: the same numbers, in the buffer that was given."""

import pytest
import torch

import logitless as ll
from logitless.resident import AllocationTracker
from logitless.vocab.backends import logits
from logitless.vocab.backends.logits import NARROW, PIECE, SOME, add_product, product
from tests.support.switches import put_back
from tests.support.vocab.comparing import operands

WIDE = PIECE + 70


@pytest.fixture(autouse=True)
def processor(monkeypatch):
    """One whose rows are the slower ones."""
    monkeypatch.setattr(logits, "is_intel", lambda: False)


def matrices(rows, inner, columns, dtype=torch.float32):
    g = torch.Generator().manual_seed(rows)
    a, w = (torch.randn(n, inner, generator=g, dtype=torch.float64) for n in (rows, columns))
    return a.to(dtype), w.to(dtype).t(), torch.full((rows, columns), torch.nan, dtype=dtype)


def in_columns(monkeypatch):
    """The rows of each product that is computed in columns from here on."""
    found, usual = [], logits.product_in_columns

    def taken(a, b, out):
        found.append(len(a))
        return usual(a, b, out)

    monkeypatch.setattr(logits, "product_in_columns", taken)
    return found


@pytest.mark.parametrize("columns", [NARROW, PIECE + 1, 2 * PIECE + 77])
@pytest.mark.parametrize("rows", [SOME[0], 8, 33, SOME[-1]])
def test_numbers(rows, columns, monkeypatch):
    taken = in_columns(monkeypatch)
    a, b, out = matrices(rows, 300, columns)
    exact = a.double() @ b.double()
    assert product(a, b, out) is out
    assert taken == [rows]
    plain = max((x - exact).abs().max() for x in (torch.mm(a, b), torch.mm(b.t(), a.t()).t()))
    assert (out - exact).abs().max() <= 1.2 * plain + 1e-7 * exact.abs().max()


@pytest.mark.parametrize("columns", [1, 2, 7, 16, WIDE])
def test_one_row_in_parts(columns):
    a, b, _ = matrices(1, 300, columns)
    room = torch.full((1, columns + 9), torch.nan)
    out = room[:, 4 : 4 + columns]
    exact = a.double() @ b.double()
    assert product(a, b, out) is out
    with put_back():
        for threads in (1, 3, 5):
            torch.set_num_threads(threads)
            assert torch.equal(product(a, b, torch.full((1, columns), torch.nan)), out)
    plain = max((x - exact).abs().max() for x in (torch.mm(a, b), torch.mm(b.t(), a.t()).t()))
    assert (out - exact).abs().max() <= 1.2 * plain + 1e-6 * exact.abs().max()
    assert room.isnan().sum() == 9


def test_an_intel_processor_multiplies_rows(monkeypatch):
    """They are no slower there, and of a few tokens nearer to float64."""
    monkeypatch.setattr(logits, "is_intel", lambda: True)
    taken = in_columns(monkeypatch)
    monkeypatch.setattr(logits, "product_of_one", lambda *given: taken.append(1))
    product(*matrices(8, 300, WIDE))
    product(*matrices(1, 300, WIDE))
    assert not taken


@pytest.mark.parametrize("rows", [0, SOME[-1] + 1])
def test_no_row_and_many_stay_as_they_are(rows, monkeypatch):
    taken = in_columns(monkeypatch)
    a, b, out = matrices(rows, 300, WIDE)
    product(a, b, out)
    assert not taken
    assert torch.equal(out, torch.mm(a, b))


@pytest.mark.parametrize(
    "operands",
    [
        pytest.param(lambda: matrices(8, 20, WIDE), id="short sums"),
        pytest.param(lambda: matrices(8, 300, NARROW - 1), id="few columns"),
        pytest.param(lambda: matrices(8, 300, WIDE, torch.float64), id="float64"),
        pytest.param(lambda: (*matrices(8, 300, WIDE)[:2], torch.empty(WIDE, 8).t()), id="already in columns"),
    ],
)
def test_others_stay_as_they_are(operands, monkeypatch):
    taken = in_columns(monkeypatch)
    a, b, out = operands()
    product(a, b, out)
    assert not taken
    assert torch.equal(out, torch.mm(a, b, out=out.clone()))


def test_not_a_number_stays_in_its_row():
    a, b, out = matrices(8, 300, WIDE)
    a[3, 5], a[4, 6] = torch.nan, torch.inf
    product(a, b, out)
    assert out[3].isnan().all()
    assert not out[4].isfinite().any()
    assert out[[0, 1, 2, 5, 6, 7]].isfinite().all()


def test_memory_is_that_of_a_piece():
    rows, columns = 16, 8 * PIECE
    a, b, out = matrices(rows, 300, columns)
    with AllocationTracker() as tracker:
        product(a, b, out)
    assert 0 < tracker.peak <= 2 * rows * PIECE * 4


@pytest.mark.parametrize("n", [5, 40])
def test_statistics_of_some_tokens(n, monkeypatch):
    taken = in_columns(monkeypatch)
    g = torch.Generator().manual_seed(n)
    hidden, weight = torch.randn(n, 256, generator=g), torch.randn(5003, 256, generator=g) / 4
    labels = torch.randint(5003, (n,), generator=g)
    labels[:2] = torch.tensor([0, 5002])
    found = ll.token_stats(hidden, ll.LMHead(weight), labels, want=("logprob", "entropy"), top_k=3, backend="eager")
    assert taken
    z = hidden.double() @ weight.double().t()
    log_p = z.log_softmax(1)
    plain = (hidden @ weight.t()).log_softmax(1)
    exact = {
        "logprob": (log_p, plain),
        "entropy": (-(log_p.exp() * log_p).sum(1), -(plain.exp() * plain).sum(1)),
    }
    at = labels[:, None]
    exact["logprob"] = tuple(x.gather(1, at)[:, 0] for x in exact["logprob"])
    for name, (wanted, dense) in exact.items():
        limit = 1.5 * (dense - wanted).abs().max() + 2e-6
        assert (getattr(found, name) - wanted).abs().max() <= limit
    assert torch.equal(found.top_k_ids, z.topk(3).indices)


@pytest.mark.parametrize("operation", [product, add_product])
@pytest.mark.parametrize(
    "rows_depth_columns",
    [
        pytest.param((24, 16, 50), id="ragged entries"),
        pytest.param((24, 50, 16), id="ragged sums"),
        pytest.param((50, 24, 16), id="ragged gradient of entries"),
        pytest.param((51, 53, 50), id="all"),
    ],
)
def test_what_is_left_of_whole_blocks_is_multiplied_apart(operation, rows_depth_columns, monkeypatch):
    """As on a GPU, whose library is slow where a row of numbers ends within a block."""
    monkeypatch.setattr(logits, "CUT", ("cpu",))
    monkeypatch.setattr(logits, "_is_chained", lambda _: False)
    asked, plain, adds = [], torch.mm, torch.Tensor.addmm_
    monkeypatch.setattr(torch, "mm", lambda a, b, out: asked.append((*a.shape, b.shape[1])) or plain(a, b, out=out))
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda x, a, b: asked.append((*a.shape, b.shape[1])) or adds(x, a, b))
    rows, depth, columns = rows_depth_columns
    a, b = torch.randn(depth, rows, dtype=torch.float64).t(), torch.randn(depth, columns, dtype=torch.float64)
    for left, right in ((a, b), (a.contiguous(), b.t().contiguous().t())):
        out, asked[:] = torch.randn(rows, columns, dtype=torch.float64), []
        exact = left @ right + (out if operation is add_product else 0)
        torch.testing.assert_close(operation(left, right, out), exact)
        sides = [(m, n) if left is a else (k, n) for m, k, n in asked]  # which end within blocks, by how these lie
        assert all(size % 8 == 0 or size < 8 for side in sides for size in side)
        assert sum(m * k * n for m, k, n in asked) == rows * depth * columns


@pytest.mark.parametrize("more", [{}, {"bias": True, "softcap": 3.0}, {"ranks": (4,), "scale": 0.7}], ids=str)
@pytest.mark.parametrize("n", [1, 3])
def test_a_long_slice_of_a_converted_head_is_made_in_parts(n, more):
    """Of as many entries as caches hold: the sampler has the tokens of the same head in fp32."""
    ops = operands((n,), 32, 50_000, dtype=torch.bfloat16, **{"bias": False} | more).training()
    wide = ops.to(torch.float32)
    with AllocationTracker() as seen:
        found = ll.sample_tokens(ops.hidden, ops.head, keep=5, generator=torch.Generator().manual_seed(3))
    expected = ll.sample_tokens(wide.hidden, wide.head, keep=5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(found.token, expected.token)
    torch.testing.assert_close(found.logsumexp, expected.logsumexp, rtol=1e-5, atol=1e-5)
    assert seen.peak < 50_000 * 32 * 4
