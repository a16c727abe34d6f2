"""The maximum over tokens against dense float64 logits: values, tokens, gradients, bytes and flop."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import logitless as ll
from logitless import retrieval
from logitless.errors import DeviceError, DtypeError, GradientError, OptionError, ShapeError
from logitless.vocab.reference import dense_logits
from tests.support.allocations import trace_allocations
from tests.support.vocab.comparing import TOLERANCE, assert_near, assert_near_in_norm, gradients, operands
from tests.support.vocab.measuring import measure
from tests.support.vocab.quantised import stored_blocks

B, L, H, V = 6, 9, 8, 83
HEADS = {
    "plain": {"bias": False},
    "bias": {},
    "scale, softcap and padding": {"scale": 0.7, "softcap": 2.5, "vocab_size": V - 6},
    "LoRA": {"ranks": (2, 3)},
    "softcap and LoRA": {"softcap": 2.5, "ranks": (2,)},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def ragged() -> torch.Tensor:
    """Masks of every kind: padding on the right, on the left, holes, all tokens, none, one."""
    mask = torch.zeros(B, L, dtype=torch.long)
    mask[0, :5] = 1
    mask[1, 4:] = 1
    mask[2, [0, 3, 4, 8]] = 1
    mask[3] = 1
    mask[5, 6] = 1
    return mask


def dense(ops, mask: torch.Tensor):
    """(values, tokens) of whole float64 logits."""
    z = dense_logits(ops.hidden, ops.head)
    return z.masked_fill(mask[..., None] == 0, -math.inf).max(1)


def problem(head: str = "bias", dtype: torch.dtype = torch.float64):
    return operands((B, L), H, V, dtype=dtype, **HEADS[head])


@pytest.mark.parametrize("budget", [None, 3000], ids=["one slice", "many slices"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_values_tokens_and_gradients(head, dtype, budget):
    ops, mask = problem(head, dtype), ragged()
    exact, tolerance = ops.to(torch.float64), TOLERANCE.get(dtype, 2e-5)
    values, tokens = dense(exact, mask)
    got = retrieval.max_pool_logits(ops.hidden, ops.head, mask, memory_budget=budget)
    assert got.values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_near(got.values.detach(), values.detach(), tolerance)
    some = mask.any(1)
    assert torch.equal(got.tokens[some].long(), tokens[some])
    assert got.tokens[~some].unique().tolist() == [-1]
    up = {"values": torch.randn(values.shape, dtype=torch.float64).masked_fill(~some[:, None], 0.0)}
    wanted = gradients({"values": values}, exact.leaves, up)
    found = gradients({"values": got.values}, ops.leaves, up)
    for name, grad in found.items():
        assert grad.dtype == ops.leaves[name].dtype
        rounding = 0.0 if dtype in TOLERANCE else torch.finfo(dtype).eps
        assert_near_in_norm(grad, wanted[name], 2 * tolerance + rounding, f"d {name}")


def test_a_document_without_tokens_has_no_gradient():
    ops, mask = problem(), ragged()
    values = retrieval.max_pool_logits(ops.hidden, ops.head, mask).values
    assert values[4].unique().tolist() == [-math.inf]
    for got in (values[4].sum(), retrieval.splade_activation(values[4]).sum()):
        found = torch.autograd.grad(got, list(ops.leaves.values()), retain_graph=True)
        assert all(not x.any() for x in found)
    assert not retrieval.splade_activation(values[4]).any()


@pytest.mark.parametrize("head", HEADS)
def test_nan_in_a_masked_token_reaches_no_gradient(head):
    ops, mask = problem(head), ragged()
    with torch.no_grad():
        ops.hidden[mask == 0] = torch.nan
    values = retrieval.max_pool_logits(ops.hidden, ops.head, mask).values
    found = torch.autograd.grad(values[mask.any(1)].sum(), list(ops.leaves.values()))
    assert all(x.isfinite().all() and x.any() for x in found)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)], ids=str)
def test_nothing_to_pool(shape):
    ops = operands(shape, H, V)
    mask = torch.zeros(shape, dtype=torch.bool)
    for got in (
        retrieval.max_pool_logits(ops.hidden, ops.head, mask).values,
        retrieval.max_pool_logits(ops.hidden, ops.head, mask, above=0.0).dense(-math.inf),
    ):
        assert got.shape == (shape[0], V)
        assert bool((got == -math.inf).all())
        found = torch.autograd.grad(got.sum(), list(ops.leaves.values()))
        assert all(not x.any() for x in found)


def test_of_equal_tokens_the_first_has_the_gradient():
    ops = problem()
    with torch.no_grad():
        for x in (ops.hidden, ops.weight, ops.bias):
            x.copy_((2 * x).round())  # sums without rounding, in whatever order
        ops.hidden[:, 4] = ops.hidden[:, 2]
        ops.hidden[:, 7] = ops.hidden[:, 2]
    got = retrieval.max_pool_logits(ops.hidden, ops.head)
    assert not ((got.tokens == 4) | (got.tokens == 7)).any()
    assert (got.tokens == 2).any()
    (grad,) = torch.autograd.grad(got.values.sum(), ops.hidden)
    assert not grad[:, [4, 7]].any()
    assert grad[:, 2].any()


def test_documents_end_to_end_are_the_same():
    ops, mask = problem(), ragged()
    packed = ops.hidden[mask.bool()]
    offsets = F.pad(mask.sum(1).cumsum(0), (1, 0))
    got = retrieval.max_pool_logits(packed, ops.head, offsets=offsets)
    expected = retrieval.max_pool_logits(ops.hidden, ops.head, mask)
    assert torch.equal(got.values, expected.values)
    offsets.fill_(0)  # as one does that is used again for the next batch: backward has its own
    numbered = retrieval.max_pool_logits(ops.hidden, ops.head, 3 * mask)
    assert torch.equal(numbered.values, expected.values)  # any number but 0 is a token that counts
    place = (mask.cumsum(1) - 1).gather(1, expected.tokens.long().clamp(min=0))
    assert torch.equal(got.tokens.long(), torch.where(expected.tokens >= 0, place, -1))
    up = torch.randn(B, V, dtype=torch.float64)
    found, wanted = (gradients({"values": x.values}, ops.leaves, {"values": up}) for x in (got, expected))
    for name, grad in found.items():
        assert_near(grad, wanted[name], 1e-12, f"d {name}")


@pytest.mark.parametrize("head", ["bias", "softcap and LoRA"])
@pytest.mark.parametrize("budget", [None, 3000], ids=["one slice", "many slices"])
@pytest.mark.parametrize("bounds", [{"above": 0.5}, {"top_k": 7}, {"above": 3.0, "top_k": 11}], ids=str)
def test_what_is_kept(bounds, budget, head):
    ops, mask = problem(head), ragged()
    values, tokens = dense(ops.to(torch.float64), mask)
    keep = values > bounds.get("above", -math.inf)
    if "top_k" in bounds:
        ranks = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        keep &= ranks < bounds["top_k"]
    keep &= mask.any(1, keepdim=True)
    got = retrieval.max_pool_logits(ops.hidden, ops.head, mask, memory_budget=budget, **bounds)
    assert torch.equal(torch.stack([got.rows, got.ids], 1), keep.nonzero())
    assert torch.equal(got.offsets.diff(), keep.sum(1))
    assert torch.equal(got.tokens.long(), tokens[keep])
    assert_near(got.values.detach(), values[keep].detach(), 1e-12)
    assert_near(got.dense().detach(), values.masked_fill(~keep, 0.0).detach(), 1e-12)
    exact = ops.to(torch.float64)
    up = {"values": torch.randn(got.values.shape, dtype=torch.float64)}
    wanted = gradients({"values": dense(exact, mask).values[keep]}, exact.leaves, up)
    for name, grad in gradients({"values": got.values}, ops.leaves, up).items():
        assert_near_in_norm(grad, wanted[name], 1e-12, f"d {name}")


def test_of_equal_entries_the_lowest_are_kept():
    hidden = torch.ones(2, 3, 1, dtype=torch.float64)
    weight = torch.tensor([1.0, 3, 2, 3, 2, 2, 0])[:, None].double()
    got = retrieval.max_pool_logits(hidden, ll.LMHead(weight), top_k=4)
    assert got.ids.tolist() == [1, 2, 3, 4] * 2


@pytest.mark.parametrize("bounds", [{"above": 0.0}, {"top_k": 3}, {"above": 0.0, "top_k": 3}], ids=str)
def test_nan_is_kept_and_makes_no_empty_document(bounds):
    ops = problem()
    with torch.no_grad():
        ops.hidden[0, 1] = torch.nan
    got = retrieval.max_pool_logits(ops.hidden, ops.head, **bounds)
    assert got.values[got.rows == 0].isnan().all()
    assert int((got.rows == 0).sum()) == bounds.get("top_k", V)
    dense = retrieval.max_pool_logits(ops.hidden, ops.head).values
    torch.testing.assert_close(got.values, dense[got.rows, got.ids], equal_nan=True)
    assert retrieval.flops(got.map(retrieval.splade_activation)).isnan()


@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("bias",), ("a",), ("b",), ("hidden", "b"), ()], ids=str)
@pytest.mark.parametrize("above", [None, 0.0])
def test_only_what_is_trained_has_a_gradient(trained, above):
    ops, mask = problem("LoRA"), ragged()
    every = operand_gradients(ops, mask, above)
    some = ops.training(*trained)
    assert {name: x.tolist() for name, x in operand_gradients(some, mask, above).items()} == {
        name: every[name].tolist() for name in some.leaves
    }


def operand_gradients(ops, mask, above):
    got = retrieval.max_pool_logits(ops.hidden, ops.head, mask, above=above)
    assert got.values.requires_grad == bool(ops.leaves)
    if not ops.leaves:
        return {}
    loss = retrieval.splade_activation(got.values).square().sum()
    return dict(zip(ops.leaves, torch.autograd.grad(loss, list(ops.leaves.values())), strict=True))


def test_under_autocast_the_operands_are_rounded():
    ops, mask = problem("LoRA", torch.float32), ragged()
    with torch.autocast("cpu", torch.bfloat16):
        got = retrieval.max_pool_logits(ops.hidden, ops.head, mask)
    exact = ops.to(torch.bfloat16).to(torch.float64)
    for x, own in zip(exact.adapters, ops.adapters, strict=True):  # small, and left as they are
        x.a.data, x.b.data = own.a.data.double(), own.b.data.double()
    exact.bias.data = ops.bias.data.double()
    values, _ = dense(exact, mask)
    assert got.values.dtype == torch.float32
    assert_near(got.values.detach(), values.detach(), 2e-5)
    up = torch.randn(values.shape, dtype=torch.float64).masked_fill(~mask.any(1, keepdim=True), 0.0)
    (grad,) = torch.autograd.grad(got.values, ops.weight, up.float())
    (wanted,) = torch.autograd.grad(values, exact.weight, up)
    assert_near_in_norm(grad, wanted, 4e-5)


def test_a_quantised_head():
    ops = stored_blocks("Q8_0", 96, (B, L), training=("hidden",))
    mask, exact = ragged(), ops.to(torch.float64)
    got = retrieval.max_pool_logits(ops.hidden, ops.head, mask)
    values, _ = dense(exact, mask)
    assert_near(got.values.detach(), values.detach(), 2e-5)
    up = torch.randn(values.shape, dtype=torch.float64).masked_fill(~mask.any(1, keepdim=True), 0.0)
    (grad,) = torch.autograd.grad(got.values, ops.hidden, up.to(got.values))
    assert_near_in_norm(grad, torch.autograd.grad(values, exact.hidden, up)[0], 4e-5)


def test_a_second_backward_is_the_same_and_a_second_derivative_refused():
    ops, mask = problem(), ragged()
    values = retrieval.max_pool_logits(ops.hidden, ops.head, mask).values.nan_to_num(neginf=0.0)
    once, twice = (torch.autograd.grad(values.square().sum(), ops.weight, retain_graph=True) for _ in range(2))
    assert torch.equal(once[0], twice[0])
    with pytest.raises(GradientError, match="expected a first-order backward"):
        torch.autograd.grad(values.square().sum(), ops.weight, create_graph=True)


class Nothing(torch.autograd.Function):
    """A number that gives no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, up):
        return None


def test_maxima_that_get_no_gradient_give_none():
    ops = problem()
    Nothing.apply(retrieval.max_pool_logits(ops.hidden, ops.head).values).backward()
    assert ops.hidden.grad is None


@pytest.mark.parametrize("above", [None, 9.0])
def test_memory_is_the_budget_and_the_documents_own_maxima(above):
    b, length, h, v, budget = 16, 32, 64, 4096, 1 << 19
    ops = operands((b, length), h, v, dtype=torch.float32).training("hidden", "weight", "bias")
    logits = 4 * b * length * v  # 8 MiB

    def step():
        got = retrieval.max_pool_logits(ops.hidden, ops.head, above=above, memory_budget=budget)
        loss = retrieval.splade_activation(got.values).square().sum()
        return torch.autograd.grad(loss, list(ops.leaves.values()))

    step()
    traced = trace_allocations(step)
    pairs = b * v if above is None else int((dense(ops.to(torch.float64), torch.ones(b, length)).values > above).sum())
    own = 4 * (ops.weight.numel() + ops.bias.numel() + 3 * ops.hidden.numel())
    each = 4 * 6 if above is None else 8 * 10  # maxima, places, activation, its logarithm, both gradients; ids
    allowed = budget + own + each * pairs
    assert traced.largest <= max(budget, 4 * ops.weight.numel(), 4 * b * v) < logits / 4
    assert traced.peak <= allowed < logits / 2, f"{traced.peak / 2**20:.2f} of {allowed / 2**20:.2f} MiB"


def test_memory_of_many_short_documents_is_the_budget_too():
    """A chunk has as many documents as there is room for their maxima, of all entries."""
    b, h, v, budget = 512, 64, 4096, 1 << 19
    ops = operands((b, 1), h, v, dtype=torch.float32).training()
    above = 3 * h**0.5
    traced = trace_allocations(
        lambda: retrieval.max_pool_logits(ops.hidden, ops.head, above=above, memory_budget=budget)
    )
    pairs = int((dense(ops.to(torch.float64), torch.ones(b, 1)).values > above).sum())
    assert traced.peak <= budget + 80 * pairs + 8 * ops.hidden.numel() < b * v


def test_one_product_forward_and_rows_of_active_pairs_backward(monkeypatch):
    b, length, h, v = 4, 16, 8, 512
    ops = operands((b, length), h, v, dtype=torch.float32).training("hidden", "weight", "bias")
    gathered = []
    bag = F.embedding_bag
    monkeypatch.setattr(F, "embedding_bag", lambda ids, *a, **k: gathered.append(ids.numel()) or bag(ids, *a, **k))
    forward = measure(lambda: retrieval.max_pool_logits(ops.hidden, ops.head))
    assert (forward.flops, forward.products) == (2 * b * length * h * v, 1)  # the default budget has room for all of it
    got = retrieval.max_pool_logits(ops.hidden, ops.head)
    loss = retrieval.splade_activation(got.values - 7).sum()
    gathered.clear()
    assert measure(lambda: torch.autograd.grad(loss, list(ops.leaves.values()), retain_graph=True)).flops == 0
    gathered.clear()
    torch.autograd.grad(loss, list(ops.leaves.values()), retain_graph=True)
    assert 0 < sum(gathered) == 2 * int((got.values > 7).sum()) < b * v / 2


def test_ragged_documents_are_not_padded_to_the_longest():
    ops = operands((8, 64), H, V, dtype=torch.float32)
    mask = torch.arange(64) < torch.tensor([64, 8, 8, 8, 4, 4, 2, 1])[:, None]
    budget = 2 * 4 * 4 * 64 * 70  # chunks of about seventy tokens
    flops = measure(lambda: retrieval.max_pool_logits(ops.hidden, ops.head, mask, memory_budget=budget)).flops
    assert flops <= 1.3 * 2 * int(mask.sum()) * H * V


def test_what_is_refused():
    ops = problem()
    h, head, mask = ops.hidden, ops.head, ragged()
    pool = retrieval.max_pool_logits
    cases = [
        (
            lambda: pool(h[0], head),
            ShapeError,
            r"hidden: expected \(documents, tokens, 8\), got \(9, 8\); pass offsets",
        ),
        (lambda: pool(h, head, mask[:, 1:]), ShapeError, r"mask: expected \(6, 9\), a number for each token, got"),
        (lambda: pool(h, head, mask.float()), DtypeError, "mask: expected integers or booleans in a tensor, got"),
        (lambda: pool(h, head, "all"), DtypeError, "mask: expected integers or booleans in a tensor, got str"),
        (lambda: pool(h, head, mask.to("meta")), DeviceError, "mask is on meta, hidden on cpu; move one"),
        (lambda: pool(h[0], head, mask, offsets=mask[0]), OptionError, "mask: expected None beside offsets"),
        (lambda: pool(h, head, offsets=mask[0]), ShapeError, r"hidden: expected \(tokens, 8\) with offsets"),
        (
            lambda: pool(h[0], head, offsets=torch.tensor([0, 5, 3, 9])),
            ShapeError,
            r"ascending from 0 to 9, got \[0, 5",
        ),
        (lambda: pool(h[0], head, offsets=torch.tensor([0, 5])), ShapeError, "offsets: expected where each"),
        (lambda: pool(h[0], head, offsets=torch.tensor([1, 9])), ShapeError, r"from 0 to 9, got \[1, 9\]"),
        (lambda: pool(h, head, above=math.nan), OptionError, "above: expected a number or None, got nan"),
        (lambda: pool(h, head, above=10**400), OptionError, "above: expected a number or None, got 1000"),
        (lambda: pool(h, head, top_k=0), OptionError, r"top_k: expected a whole number in 1..83 \(the vocabulary\)"),
        (lambda: pool(h[..., 1:], head), ShapeError, "the width of the head's weight"),
        (lambda: retrieval.splade_activation(h, 3), OptionError, "logs: expected 1 or 2, got 3"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_group_of_one_rank_is_a_whole_head():
    """Several are in tests/vocab/ranks."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        shard = ll.VocabShard(torch.distributed.group.WORLD, 0, V)
        ops, mask = problem(), ragged()
        got, want = (
            retrieval.max_pool_logits(ops.hidden, ll.LMHead(ops.weight, ops.bias, shard=x), mask) for x in (shard, None)
        )
        assert torch.equal(got.values, want.values)
        assert torch.equal(got.tokens, want.tokens)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
def test_in_a_compiled_caller_it_is_a_graph_break():
    ops, mask = problem(), ragged()

    def loss(hidden):
        return retrieval.splade_activation(retrieval.max_pool_logits(hidden, ops.head, mask).values).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="max_pool_logits breaks the graph; leave fullgraph=True"):
        torch.compile(loss, backend="eager", fullgraph=True)(ops.hidden)
    (got,), (expected,) = (torch.autograd.grad(run(ops.hidden), ops.hidden) for run in (compiled, loss))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_of_a_checkpoint(reentrant):
    hidden = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, 6, dtype=torch.float64, requires_grad=True)

    def pooled(h):
        return retrieval.max_pool_logits(h, ll.LMHead(weight)).values

    expected = torch.autograd.grad(pooled(hidden).square().sum(), (hidden, weight))
    checkpoint(pooled, hidden, use_reentrant=reentrant).square().sum().backward()
    for x, g in zip((hidden, weight), expected, strict=True):
        torch.testing.assert_close(x.grad, g)
