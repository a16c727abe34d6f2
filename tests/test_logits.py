"""per_token_logps: one result by every method, and the memory that each method really takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless import chunked_self_certainty, per_token_logps
from logitless import logits as module
from logitless.errors import DtypeError, GradientError, LabelError, OptionError, ShapeError
from tests.support.allocations import peak_new_bytes, trace_allocations

METHODS = ("dense", "loop", "chunked", "recompute", "auto")
STREAMED = ("loop", "chunked", "recompute")
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of a few tokens, so that small problems have many of them and the last one is ragged."""
    monkeypatch.setitem(module.TILE_BYTES, "cpu", 3 * 4 * 37)


def problem(shape=(3, 5), vocab=37, dtype=torch.float64, spread=4.0):
    logits = (spread * torch.randn(*shape, vocab, dtype=torch.float64)).to(dtype).requires_grad_()
    ids = torch.randint(vocab, shape)
    if ids.numel() > 1:
        ids.view(-1)[0], ids.view(-1)[-1] = 0, vocab - 1
    return logits, ids


def oracle(logits, ids, cotangent):
    """Value and gradient in float64 from exponentials alone."""
    z = logits.detach().double()
    p = (z - z.amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True)
    onehot = torch.zeros_like(p).scatter(-1, ids[..., None], 1.0)
    return (p * onehot).sum(-1).log(), cotangent.double()[..., None] * (onehot - p)


@every_method
@pytest.mark.parametrize("shape", [(3, 5), (7,), (1, 1), (2, 1, 3, 2), ()], ids=str)
@pytest.mark.parametrize(
    ("dtype", "value_error", "grad_error"),
    [(torch.float64, 1e-13, 1e-13), (torch.float32, 3e-6, 1e-6), (torch.bfloat16, 3e-6, 5e-3)],
    ids=["fp64", "fp32", "bf16"],
)
@pytest.mark.usefixtures("small_tiles")
def test_every_method_agrees_with_float64(method, shape, dtype, value_error, grad_error):
    logits, ids = problem(shape, dtype=dtype)
    result = per_token_logps(logits, ids, method=method)
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.shape == ids.shape
    cotangent = torch.randn_like(result)
    value, slope = oracle(logits, ids, cotangent)
    torch.testing.assert_close(result.double(), value, rtol=value_error, atol=value_error)
    (grad,) = torch.autograd.grad(result, logits, cotangent)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), slope, rtol=grad_error, atol=grad_error)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    vocab=st.integers(1, 40),
    chunk_size=st.integers(1, 6),
    tile=st.integers(1, 2000),
)
@settings(max_examples=40)
def test_sizes_that_divide_nothing(shape, vocab, chunk_size, tile):
    logits, ids = problem(tuple(shape), vocab)
    cotangent = torch.randn(shape, dtype=torch.float64)
    value, slope = oracle(logits, ids, cotangent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.TILE_BYTES, "cpu", tile)
        for options in ({"method": "recompute"}, {"method": "chunked", "chunk_size": chunk_size}):
            result = per_token_logps(logits, ids, **options)
            (grad,) = torch.autograd.grad(result, logits, cotangent)
            torch.testing.assert_close(result, value)
            torch.testing.assert_close(grad, slope)


@every_method
@pytest.mark.usefixtures("small_tiles")
def test_strided_and_expanded_logits(method):
    base = torch.randn(37, 6, 4, dtype=torch.float64)
    ids = torch.randint(37, (4, 6))
    for logits in (base.permute(2, 1, 0), base[:, :1].permute(2, 1, 0).expand(4, 6, 37)):
        leaf = logits.detach().requires_grad_()
        result = per_token_logps(leaf, ids, method=method)
        cotangent = torch.randn_like(result)
        value, slope = oracle(leaf, ids, cotangent)
        torch.testing.assert_close(result, value)
        torch.testing.assert_close(torch.autograd.grad(result, leaf, cotangent)[0], slope)


@every_method
def test_forbidden_tokens(method):
    """-inf entries have no probability and no gradient; a forbidden id has log-prob -inf."""
    logits, _ = problem((4,))
    with torch.no_grad():
        logits[:, 1::2] = -torch.inf
    ids = torch.tensor([0, 2, 36, 1])
    result = per_token_logps(logits, ids, method=method)
    kept = logits.detach()[:, ::2].log_softmax(-1)
    torch.testing.assert_close(result[:3], kept[[0, 1, 2], [0, 1, 18]])
    assert result[3] == -torch.inf
    (grad,) = torch.autograd.grad(result[:3].sum(), logits)
    assert grad.isfinite().all()
    assert (grad[:, 1::2] == 0).all()


@every_method
def test_a_row_without_any_token_is_nan(method):
    logits = torch.full((2, 5), -torch.inf)
    logits[1] = 0.0
    result = per_token_logps(logits, torch.tensor([1, 1]), method=method)
    assert result[0].isnan()
    assert result[1].isfinite()


@pytest.mark.parametrize("margin", [20.0, 60.0])
def test_recompute_keeps_the_digits_of_a_sure_token(margin):
    logits = torch.zeros(2, 50)
    logits[:, 3] = margin
    logits.requires_grad_()
    ids = torch.tensor([3, 4])
    result = per_token_logps(logits, ids, method="recompute")
    exact = logits.detach().double().log_softmax(-1)[[0, 1], ids]
    sure = -49 * torch.exp(torch.tensor(-margin, dtype=torch.float64))
    torch.testing.assert_close(result.double(), torch.stack([sure, exact[1]]), rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(result[0], logits)
    torch.testing.assert_close(grad[0, 3].double(), -sure, rtol=1e-5, atol=0)


@every_method
def test_nothing_to_do_keeps_the_graph(method):
    for shape in ((0, 5), (3, 0)):
        logits, ids = problem(shape)
        result = per_token_logps(logits, ids, method=method)
        assert result.shape == shape
        assert torch.autograd.grad(result.sum(), logits)[0].shape == logits.shape


def test_recompute_under_a_second_backward_and_no_grad():
    logits, ids = problem()
    result = per_token_logps(logits, ids, method="recompute")
    first = torch.autograd.grad(result.sum(), logits, retain_graph=True)[0]
    second = torch.autograd.grad(2 * result.sum(), logits)[0]
    torch.testing.assert_close(second, 2 * first)
    assert torch.autograd.gradcheck(lambda z: per_token_logps(z, ids, method="recompute"), logits)
    with torch.no_grad():
        assert not per_token_logps(logits, ids, method="recompute").requires_grad
    result = per_token_logps(logits, ids, method="recompute")
    with pytest.raises(GradientError, match="method='dense'"):
        torch.autograd.grad(result.sum(), logits, create_graph=True)


def test_agrees_with_trl():
    utils = pytest.importorskip("trl.trainer.utils", reason="needs the rl extra")
    logits, ids = problem(dtype=torch.float32)
    theirs = utils.selective_log_softmax(logits, ids)
    for method in METHODS:
        torch.testing.assert_close(per_token_logps(logits, ids, method=method), theirs)


# Memory, counted storage by storage. B rows of log-softmax are what the dense method needs.
B, L, V = 8, 64, 1000
ROW = L * V * 4
SMALL = B * L * 64  # ids, results, log-sum-exps: a few numbers per token


@pytest.fixture
def tiny_tile(monkeypatch):
    monkeypatch.setitem(module.TILE_BYTES, "cpu", ROW // 16)


def big():
    return problem((B, L), V, torch.float32)


@pytest.mark.usefixtures("tiny_tile")
def test_memory_without_gradient(monkeypatch):
    logits, ids = big()
    monkeypatch.setattr(module, "SMALL_BYTES", 2 * ROW)  # what a chunk of no given size fits
    with torch.no_grad():
        peak = {m: peak_new_bytes(lambda m=m: per_token_logps(logits, ids, method=m)) for m in ("dense", *STREAMED)}
        two = peak_new_bytes(lambda: per_token_logps(logits, ids, method="chunked", chunk_size=2))
    assert B * ROW <= peak["dense"] <= B * ROW + SMALL
    assert ROW <= peak["loop"] <= 2 * ROW + SMALL  # a row is freed only after the next one exists
    assert 2 * ROW <= two <= 4 * ROW + SMALL
    assert 2 * ROW <= peak["chunked"] <= 4 * ROW + SMALL
    assert peak["recompute"] <= 2 * ROW // 16 + SMALL


@pytest.mark.usefixtures("tiny_tile")
def test_a_loop_saves_every_row_for_backward_and_recompute_saves_none():
    logits, ids = big()
    kept = {m: trace_allocations(lambda m=m: per_token_logps(logits, ids, method=m)).kept for m in STREAMED}
    assert kept["loop"] >= B * ROW
    assert kept["chunked"] >= B * ROW
    assert kept["recompute"] <= SMALL


@pytest.mark.usefixtures("tiny_tile")
@pytest.mark.parametrize(("dtype", "tile_copies"), [(torch.float32, 0), (torch.bfloat16, 2)], ids=["fp32", "bf16"])
def test_backward_of_recompute_allocates_the_gradient_once(dtype, tile_copies):
    logits, ids = problem((B, L), V, dtype)
    result = per_token_logps(logits, ids, method="recompute")
    gradient = logits.numel() * dtype.itemsize
    peak = peak_new_bytes(lambda: torch.autograd.grad(result.sum(), logits))
    assert gradient <= peak <= gradient + tile_copies * ROW // 16 + SMALL


@pytest.mark.usefixtures("tiny_tile")
def test_auto_is_dense_when_small_and_recomputes_when_not(monkeypatch):
    logits, ids = big()
    assert trace_allocations(lambda: per_token_logps(logits, ids)).kept >= B * ROW
    monkeypatch.setattr(module, "SMALL_BYTES", B * ROW - 1)
    assert trace_allocations(lambda: per_token_logps(logits, ids)).kept <= SMALL


def test_errors_say_what_to_do():
    logits, ids = problem()
    with pytest.raises(ShapeError, match=r"\(3, 5\).*\(3, 4\).*shift or slice"):
        per_token_logps(logits, ids[:, 1:])
    with pytest.raises(ShapeError, match="vocabulary"):
        per_token_logps(torch.tensor(1.0), torch.tensor(0))
    for bad in (-100, 37):
        with pytest.raises(LabelError, match=rf"\[0, 37\), got {bad}"):
            per_token_logps(logits, ids.index_fill(1, torch.tensor([2]), bad))
    with pytest.raises(DtypeError, match=r"input_ids must be a tensor of torch.int64, got torch.float32: convert with"):
        per_token_logps(logits, ids.float())
    with pytest.raises(DtypeError, match=r"input_ids must be a tensor of torch.int64, got list: convert with"):
        per_token_logps(logits, ids.tolist())
    with pytest.raises(DtypeError, match=r"input_ids must be a tensor of torch.int64, got ndarray"):
        per_token_logps(logits, ids.numpy())
    with pytest.raises(DtypeError, match=r"logits must be a tensor of torch.float32 or .*, got torch.int64"):
        per_token_logps(ids[..., None], ids)
    with pytest.raises(DtypeError, match=r"logits must be a tensor of torch.float32 or .*, got ndarray"):
        per_token_logps(logits.detach().numpy(), ids)
    with pytest.raises(OptionError, match="method"):
        per_token_logps(logits, ids, method="fast")  # type: ignore[arg-type]
    sizes = [{"method": "chunked", "chunk_size": size} for size in (0, 1.5, True, "2")]
    for options in (*sizes, {"method": "loop", "chunk_size": 2}):
        with pytest.raises(OptionError, match="chunk_size"):
            per_token_logps(logits, ids, **options)
    two = (per_token_logps(logits, ids, method="chunked", chunk_size=size) for size in (2, torch.tensor(2)))
    assert torch.equal(*two)


@pytest.mark.parametrize(
    "of",
    [
        lambda z: per_token_logps(z, torch.arange(4), method="recompute"),
        lambda z: chunked_self_certainty(z, 10),
    ],
    ids=["log-probs", "self-certainty"],
)
def test_several_upstream_gradients_at_once_are_refused_in_one_line(of):
    z = torch.randn(4, 30, requires_grad=True)
    with pytest.raises(GradientError, match="expected one upstream gradient"):
        torch.autograd.grad(of(z), z, torch.eye(4), is_grads_batched=True)
