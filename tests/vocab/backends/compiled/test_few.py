"""A few tokens on a CPU, by the head's rows as they lie: exact products, and no copy of a bf16 head in fp32."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless.vocab.backends.compiled import few
from logitless.vocab.backends.conversions import multiplies_few
from logitless.vocab.noise import Noise
from logitless.vocab.reference import dense_token_stats
from tests.support.switches import put_back
from tests.support.vocab.comparing import assert_near, operands
from tests.support.vocab.processors import multiply_by, needs_library, needs_pairs

pytestmark = needs_library
WANT = ("logprob", "entropy", "rank")
EACH = torch.linspace(0.3, 3.0, 32)
DTYPES = {  # of hidden states and of the head, by how they are multiplied
    "tiles": (torch.bfloat16, torch.bfloat16),
    "pairs": (torch.bfloat16, torch.bfloat16),
    "widened": (torch.float32, torch.bfloat16),
    "floats": (torch.float32, torch.float32),
}


@pytest.fixture(
    autouse=True, params=[*(pytest.param(kind, marks=needs_pairs) for kind in ("tiles", "pairs")), "widened", "floats"]
)
def kind(request, monkeypatch):
    if request.param in ("tiles", "pairs"):
        multiply_by(request.param, monkeypatch)
    monkeypatch.setattr(few, "is_intel", lambda: False)
    return request.param


@pytest.fixture(autouse=True)
def products(kind, monkeypatch):
    """How many tokens each product of a few had, of a head of any size."""
    monkeypatch.setattr(few, "WORTH", 1)
    found, usual = [], few.product_of_few

    def product(tokens, rows, out, pairs):
        assert (rows.dtype, pairs) == (DTYPES[kind][1], kind in ("tiles", "pairs"))
        found.append(len(tokens))
        return usual(tokens, rows, out, pairs)

    monkeypatch.setattr(few, "product_of_few", product)
    return found


def multiplied(kind, n):
    """Whether so many tokens are: of one fp32 token torch's product is as fast."""
    return kind != "floats" or n > 1


def problem(kind, n, h, v, bias=False, **more):
    hidden, weight = DTYPES[kind]
    ops = operands((n,), h, v, dtype=weight, bias=bias, **more).training()
    ops.hidden = ops.hidden.detach().to(hidden)
    return ops


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("n", "h", "v"), [(1, 1, 1), (1, 65, 4099), (5, 33, 193), (7, 64, 98), (32, 130, 1031)], ids=str
)
def test_every_size_is_the_oracle(kind, n, h, v, threads, products):
    ops = problem(kind, n, h, v)
    with put_back():
        torch.set_num_threads(threads)
        found = ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, backend="eager")
    exact = ops.to(torch.float64)
    right = dense_token_stats(exact.hidden, exact.head, ops.labels, want=WANT)
    for name in WANT:
        assert_near(getattr(found, name), right[name].double(), 2e-5, name)
    assert set(products) == ({n} if multiplied(kind, n) else set())


@pytest.mark.parametrize("temperature", [0.7, EACH], ids=["0.7", "tensor"])
@pytest.mark.parametrize(
    "more", [{}, {"bias": True}, {"softcap": 3.0}, {"ranks": (4,)}, {"vocab_size": 1020, "scale": 0.8}], ids=str
)
def test_every_head_is_the_oracle(kind, more, temperature, products):
    ops = problem(kind, 32, 37, 1031, **more)
    found = ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, temperature=temperature, backend="eager")
    exact = ops.to(torch.float64)
    right = dense_token_stats(exact.hidden, exact.head, ops.labels, want=WANT, temperature=temperature)
    for name in WANT:
        assert_near(getattr(found, name), right[name].double(), 2e-5, name)
    assert set(products) == {32}


@pytest.mark.parametrize("n", [1, 2, 31, 32])
def test_a_second_look_reads_logits_in_columns(kind, n, products):
    ops, want = problem(kind, n, 37, 4099, reference=True), ("jsd", "kl", "rank")
    found = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, backend="eager")
    exact = ops.to(torch.float64)
    right = dense_token_stats(exact.hidden, exact.head, ops.labels, want=want, reference=exact.reference)
    for name in want:
        assert_near(getattr(found, name), right[name].double(), 2e-5, name)
    assert bool(products) == multiplied(kind, n)


def test_rows_that_lie_apart_beside_nan(kind, products):
    ops = problem(kind, 3, 31, 500)
    wide = torch.full((500, 40), torch.nan, dtype=ops.weight.dtype)
    wide[:, 3:34] = ops.weight
    found, right = (
        ll.token_stats(ops.hidden, ll.LMHead(w), ops.labels, want=WANT, backend="eager")
        for w in (wide[:, 3:34], ops.weight)
    )
    assert torch.equal(found.logprob, right.logprob)
    assert products


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_a_tokens_logits_do_not_depend_on_the_others(kind, columns):
    (hidden, weight), pairs = DTYPES[kind], kind in ("tiles", "pairs")
    tokens, rows = torch.randn(32, 70).to(hidden).float(), torch.randn(1031, 70).to(weight)

    def product(some):
        out = some.new_empty(1031, len(some)).t() if columns else some.new_empty(len(some), 1031)
        return few.product_of_few(some, rows, out, pairs)

    together = product(tokens)
    for n in (1, 2, 3, 6, 31):
        with put_back():
            torch.set_num_threads(n)
            assert torch.equal(product(tokens[-n:]), together[-n:])


@pytest.mark.parametrize("of", ["hidden", "weight"])
def test_numbers_that_do_not_lie_side_by_side(kind, of, products):
    """Hidden states are copied, and a head keeps torch's product."""
    ops = problem(kind, 5, 64, 700)
    weight = ops.weight.detach()
    weight = weight.t().contiguous().t() if of == "weight" else weight
    hidden = ops.hidden.t().contiguous().t() if of == "hidden" else ops.hidden
    found = ll.token_stats(hidden, ll.LMHead(weight), ops.labels, want=WANT, backend="eager")
    right = dense_token_stats(hidden.double(), ll.LMHead(weight.double()), ops.labels, want=WANT)
    for name in WANT:
        assert_near(getattr(found, name), right[name].double(), 2e-5, name)
    assert bool(products) == (of == "hidden")


def test_whoever_watches_tensors_sees_torchs_product(kind, products):
    class Watches(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    ops = problem(kind, 5, 64, 700)
    with Watches():
        ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, backend="eager")
    assert not products


def test_operands_that_autocast_rounds_keep_their_product(products):
    hidden, weight = torch.randn(5, 64), torch.randn(700, 64)
    with torch.autocast("cpu", torch.bfloat16):
        ll.token_stats(hidden, ll.LMHead(weight), want=("logsumexp",), backend="eager")
    assert not products


def test_a_sharded_head_keeps_its_product(kind):
    ops = problem(kind, 5, 64, 700)
    inputs = SimpleNamespace(hidden=ops.hidden)
    call = SimpleNamespace(
        shard=None,
        n_tokens=5,
        head=ops.head,
        inputs=inputs,
        compute=torch.float32,
        budget=1 << 28,
        options=SimpleNamespace(autocast=None),
    )
    assert multiplies_few(call)
    call.shard = object()
    assert not multiplies_few(call)


def test_draws_are_those_of_fp32(kind, products):
    """Of a head whose logits differ by more than rounding."""
    ops = problem(kind, 4, 64, 3001)
    exact = ll.LMHead(ops.weight.double())
    noise = Noise(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    found = ll.sample_tokens(ops.hidden, ops.head, temperature=0.9, top_p=0.9, noise=noise)
    assert products
    right = ll.sample_tokens(ops.hidden.double(), exact, temperature=0.9, top_p=0.9, noise=noise)
    assert torch.equal(found.token, right.token)


def test_a_slice_is_as_long_as_of_an_fp32_head(kind):
    """No copy limits it to what the caches hold."""
    ops = problem(kind, 2, 100, 40_000)
    told = ll.explain(ops.hidden, ops.head, want=("logsumexp",)).slices
    assert told.multiplies_few
    assert told.width == 40_000


@pytest.mark.parametrize(("n", "dtype"), [(33, None), (4, torch.float64), (4, torch.float16)], ids=str)
def test_others_keep_their_product(kind, n, dtype, products):
    ops = problem(kind, n, 24, 1031)
    weight = ops.weight if dtype is None else ops.weight.to(dtype)
    ll.token_stats(ops.hidden.to(weight.dtype), ll.LMHead(weight), ops.labels, want=WANT, backend="eager")
    assert not products


def test_an_intel_processor_keeps_its_makers_products_but_for_tiles(kind, products, monkeypatch):
    monkeypatch.setattr(few, "is_intel", lambda: True)
    ops = problem(kind, 2, 24, 1031)
    ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, backend="eager")
    assert bool(products) == (kind == "tiles")


def test_a_small_budget_has_no_room_for_packed_operands(kind, products):
    """Operands in fp32 are read as they lie. Logits take next to nothing."""
    ops = problem(kind, 2, 512, 64)
    for budget, taken in ((30_000, kind in ("widened", "floats")), (100_000_000, True)):
        products.clear()
        told = ll.explain(ops.hidden, ops.head, want=("logsumexp",), memory_budget=budget)
        assert told.buffer_bytes <= budget
        assert told.slices.multiplies_few == taken
        ll.token_stats(ops.hidden, ops.head, want=("logsumexp",), memory_budget=budget)
        assert bool(products) == taken
        if taken:
            assert told.buffer_bytes >= few.nbytes(512, kind in ("tiles", "pairs"))


def test_without_a_compiler_nothing_is_said(kind, products, monkeypatch):
    monkeypatch.setattr(few.library, "is_made", lambda: False)
    monkeypatch.setattr(few, "why_not", lambda device: "no compiler")
    monkeypatch.setattr(few, "_can_be_had", few._can_be_had.__wrapped__)
    ops = problem(kind, 2, 24, 1031)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, backend="eager")
    assert not products


def test_small_heads_compile_nothing(kind, products, monkeypatch):
    monkeypatch.setattr(few, "WORTH", 1 << 24)
    ops = problem(kind, 2, 24, 1031)
    ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, backend="eager")
    assert not products
