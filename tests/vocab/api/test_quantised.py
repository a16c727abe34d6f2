"""A quantised head gives what its dequantised weight gives in float64: statistics, gradients, losses."""

import pytest
import torch

import logitless as ll
from logitless.vocab.head.quantised import QuantisedWeight
from logitless.vocab.head.sparse import SparseBackward
from logitless.vocab.reference import dense_cross_entropy
from tests.support.vocab.comparing import ALONE, EVERYTHING, PAIRED, assert_near, assert_near_in_norm, compare
from tests.support.vocab.quantised import KINDS, blocks_of, stored_blocks

V = 331  # neither a multiple of a block nor of a slice


@pytest.mark.halved
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EVERYTHING)
def test_each_statistic_of_each_format(kind, name):
    ops = stored_blocks(kind, V, bias=False, reference=name in PAIRED)
    compare(ops, (name,), memory_budget=300_000)


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("budget", [None, 300_000])
def test_everything_at_once(kind, dtype, budget, backend):
    ops = stored_blocks(kind, V, (9,), dtype=dtype, ranks=(3, 2), reference=True)
    ops.labels[[2, 7]] = -100
    candidates = torch.randint(V, (9, 4))
    candidates[:, 3] = candidates[:, 1]
    options = {"top_k": 5, "candidates": candidates, "jsd_beta": 0.3, "temperature": 0.8}
    tolerance = 1e-10 if dtype == torch.float64 else 5e-5
    compare(ops, EVERYTHING, memory_budget=budget, backend=backend, tolerance=tolerance, **options)


@pytest.mark.parametrize("training", [("hidden",), ("a", "b"), ("bias",), ()], ids=str)
@pytest.mark.parametrize("transform", [{"softcap": 4.0}, {"scale": 0.6, "vocab_size": V - 9}], ids=str)
def test_transforms_and_who_is_trained(training, transform, backend):
    ops = stored_blocks("Q8_0", V, (2, 3), ranks=(3,), training=training, **transform)
    temperature = torch.rand(2, 3) + 0.5
    compare(ops, ALONE, top_k=4, temperature=temperature, memory_budget=200_000, backend=backend, tolerance=5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_rounded_as_a_model_holds_them(dtype):
    """A weight whose dtype is narrow is the dense head of that dtype, to the bit."""
    blocks, truth = blocks_of("Q8_0", V, 96)
    hidden, labels = torch.randn(6, 96, dtype=dtype), torch.randint(V, (6,))
    heads = ll.LMHead(QuantisedWeight.gguf(blocks, "Q8_0", dtype=dtype)), ll.LMHead(truth.to(dtype))
    want = ("logprob", "entropy", "self_certainty", "rank")
    got, expected = (ll.token_stats(hidden, head, labels, want=want, top_k=3, memory_budget=2**18) for head in heads)
    assert torch.equal(got.rank, expected.rank)
    assert torch.equal(got.top_k_ids, expected.top_k_ids)
    for name in want:
        assert_near(getattr(got, name), getattr(expected, name).double(), 2e-5, name)


def test_autocast():
    ops = stored_blocks("Q8_0", V, training=("hidden",))
    dense = ll.LMHead(ops.truth, ops.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = (ll.token_stats(ops.hidden, head, ops.labels).logprob for head in (ops.head, dense))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("budget", [None, 300_000])
def test_losses(budget, backend):
    ops = stored_blocks("Q4_K", V, (11,), ranks=(2,))
    ops.labels[3] = -100
    exact = ops.to(torch.float64)
    given = {"label_smoothing": 0.1, "z_loss": 1e-3, "temperature": 0.9}
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, memory_budget=budget, backend=backend, **given)
    expected = dense_cross_entropy(exact.hidden, exact.head, ops.labels, **given)
    assert_near(loss.detach(), expected.detach(), 2e-5)
    found = torch.autograd.grad(loss * 3, list(ops.leaves.values()))
    wanted = torch.autograd.grad(expected * 3, list(exact.leaves.values()))
    for name, got, want in zip(ops.leaves, found, wanted, strict=True):
        assert_near_in_norm(got, want, 5e-5, name)
    options = {"want": ("logprob", "entropy"), "memory_budget": budget, "backend": backend}
    loss = ll.token_loss(lambda s: s.entropy - s.logprob, ops.hidden, ops.head, ops.labels, **options)
    again = ll.token_loss(lambda s: s.entropy - s.logprob, exact.hidden, exact.head, ops.labels, **options)
    assert_near(loss.detach(), again.detach(), 5e-5)


def test_a_sparse_backward():
    ops = stored_blocks("Q8_0", V, (13,), bias=False, ranks=(2,), spread=30.0)
    ops = type(ops)(**{**vars(ops), "hidden": (ops.hidden.detach() * 8).requires_grad_()})
    sparse = SparseBackward(0.05, width=64)
    head = ll.LMHead(ops.weight, adapters=ops.adapters, sparse=sparse)
    loss = ll.linear_cross_entropy(ops.hidden, head, ops.labels)
    exact = ops.to(torch.float64)
    expected = dense_cross_entropy(exact.hidden, exact.head, ops.labels)
    assert_near(loss.detach(), expected.detach(), 2e-5)
    assert float(sparse.skipped_share) > 0.2
    (got,), (want,) = (torch.autograd.grad(x, y.hidden) for x, y in ((loss, ops), (expected, exact)))
    bound = float(sparse.logit_error) * float(ops.truth.norm(dim=1).max())
    assert float((got - want).norm()) <= bound + 1e-4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
def test_a_compiled_caller():
    """Its graph breaks at the call, whose numbers are the same; one that may not break is told so."""
    ops = stored_blocks("Q8_0", V, training=("hidden",))

    def step(hidden):
        stats = ll.token_stats(hidden, ops.head, ops.labels, want=("logprob", "entropy"))
        return stats.logprob.sum() + ll.linear_cross_entropy(hidden, ops.head, ops.labels)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a quantised head break the graph"):
        torch.compile(step, backend="eager", fullgraph=True)(ops.hidden)
    (got,), (expected,) = (torch.autograd.grad(run(ops.hidden), ops.hidden) for run in (compiled, step))
    assert torch.equal(got, expected)
