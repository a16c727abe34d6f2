"""`token_loss` per sequence against the same function of the oracle's numbers: values, gradients, chunks."""

import pytest
import torch

import logitless as ll
from logitless import losses
from logitless.algebra.costs import best_bytes
from logitless.errors import GradientError, LogitlessError, OptionError, ShapeError
from logitless.vocab.head.sparse import SparseBackward
from tests.support.allocations import trace_allocations
from tests.support.vocab.comparing import EVERYTHING, assert_near, operands
from tests.support.vocab.measuring import not_interpreted
from tests.support.vocab.token_losses import REDUCTIONS, assert_same, call, check, grads, leaves_of
from tests.vocab.api.test_sampling_mask import mask_around

ROWS = 8 * 5 * 23  # bytes of five rows of 23 float64 entries
MIXED = 4 * ROWS, 3 * ROWS // 2  # where shorter responses fit into a chunk and the longest does not, eager and on a GPU
BUDGETS = [None, *MIXED, 1]
WANT = ("logprob", "entropy")


def responses(dtype=torch.float64, lead=(5, 6), **kwargs):
    """Operands with prompts and padding ignored, a response of no token and one of all; old log-probs, advantages."""
    ops = operands(lead, dtype=dtype, **kwargs)
    rows = ops.labels.view(lead[0], -1)
    rows[0, 2:] = rows[1, :3] = rows[1, 5] = rows[2] = rows[4, 4:] = -100
    mask = ops.labels != -100
    old = (-3 + torch.randn(lead, dtype=dtype)).masked_fill(~mask, -1e9)
    advantages = torch.randn(lead[0], dtype=dtype, requires_grad=True)
    return ops, (old, advantages, mask)


def gspo(s, old, advantages, mask):
    loss = losses.gspo(s.logprob, old, advantages, mask, 0.5, 0.5)
    return loss - 0.01 * (s.entropy * mask).sum(-1)


def squared(s):
    return s.logprob.flatten(1).sum(1).square()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_ratio_for_a_response(reduction, budget, dtype, backend):
    ops, inputs = responses(dtype)
    options = {"reduction": reduction, "memory_budget": budget, "backend": backend}
    check(gspo, ops, inputs, per="sequence", want=WANT, **options)
    check(squared, ops, per="sequence", **options)


@pytest.mark.halved
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trainable", [("hidden",), ("weight",), ("bias",), ("a", "b"), ("hidden", "a"), ()], ids=str)
def test_whatever_is_frozen(trainable, budget, backend):
    ops, inputs = responses(ranks=(2, 1))
    ops = ops.training(*trainable)
    check(gspo, ops, inputs, per="sequence", want=WANT, memory_budget=budget, backend=backend)
    fixed = tuple(x.detach() for x in inputs)
    loss = call(gspo, ops, fixed, per="sequence", want=WANT, memory_budget=budget, backend=backend)
    assert loss.requires_grad == bool(trainable)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("transform", [{"softcap": 4.0}, {"scale": 1.7, "softcap": 2.5, "vocab_size": 20}], ids=str)
def test_every_statistic_of_a_head_with_a_reference(transform, budget, backend):
    ops, (_, advantages, _) = responses(reference=True, **transform)

    def loss_fn(s, advantages):
        each = sum(getattr(s, name) for name in EVERYTHING if name not in ("rank", "label_logit"))
        best = s.top_k_logits.mean(-1) + s.candidate_logits.square().sum(-1) + s.rank
        return advantages * (each + 0.1 * s.logprob * best).sum(-1).square()

    options = {"want": EVERYTHING, "top_k": 2, "candidates": torch.randint(20, (5, 6, 3)), "temperature": 0.7}
    check(loss_fn, ops, (advantages,), per="sequence", memory_budget=budget, backend=backend, **options)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("labelled", [True, False])
def test_pairs_of_responses(labelled, budget, backend):
    """A sequence is all that lies below the first dimension, its inputs have that alone."""
    ops = operands((4, 2, 3))
    if labelled:
        ops.labels[1, 0] = ops.labels[2] = ops.labels[3, :, 2] = -100
    else:
        ops.labels = None
    margin, ref = torch.rand(4, dtype=torch.float64), torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)

    def dpo(s, margin, ref):
        numbers = s.logprob if labelled else s.entropy
        (chosen, rejected), (ref_chosen, ref_rejected) = numbers.sum(-1).unbind(1), ref.sum(-1).unbind(1)
        return losses.dpo(chosen, rejected, ref_chosen, ref_rejected) * margin

    want = ("logprob",) if labelled else ("entropy",)
    check(dpo, ops, (margin, ref), per="sequence", want=want, memory_budget=budget, backend=backend)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_over_sampling_masks(reduction):
    ops, inputs = responses()
    mask = mask_around(ops.labels.flatten(), 23)
    check(gspo, ops, inputs, per="sequence", want=WANT, reduction=reduction, sampling_mask=mask)


@pytest.mark.parametrize(("budget", "expected"), [(None, [[0, 1, 3, 4]]), ("mixed", [[0, 1], [4], [3]]), (1, None)])
def test_what_the_loss_sees(budget, expected, backend):
    """Whole responses, those that are longer than a chunk last and alone; none that no token of counts."""
    ops, _ = responses()
    which, seen = torch.arange(5), []

    def recording(s, which):
        seen.append(which.tolist())
        ignored = ops.labels[which] == -100
        assert s.logprob.shape == (len(which), 6)
        assert torch.equal(s.logprob == 0, ignored)
        assert torch.equal(s.top_k_ids[..., 0] == -1, ignored)
        return -s.logprob.sum(1)

    if budget == "mixed":
        budget = MIXED[1] if backend == "triton" else MIXED[0] + 4 * best_bytes(1, 8)
    call(recording, ops, (which,), per="sequence", top_k=1, memory_budget=budget, backend=backend)
    assert seen == (expected or [[0], [1], [3], [4]])


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_second_backward_gives_the_same_bits(budget, backend):
    ops, inputs = responses(torch.float32)
    loss = call(gspo, ops, inputs, per="sequence", want=WANT, memory_budget=budget, backend=backend)
    first = grads(loss, ops, inputs, retain_graph=True)
    for a, b in zip(first, grads(loss, ops, inputs), strict=True):
        assert torch.equal(a, b)


def test_reductions_agree(backend):
    ops, inputs = responses()
    mean, total, each = (
        call(gspo, ops, inputs, per="sequence", want=WANT, reduction=reduction, backend=backend)
        for reduction in REDUCTIONS
    )
    assert each.shape == (5,)
    assert each[2] == 0
    assert_same((mean * 4, each.sum()), (total, total))
    expected = grads(total, ops, inputs)
    assert_same(grads(mean * 4, ops, inputs), expected)
    assert_same(grads(each.sum(), ops, inputs), expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lead", [(5, 3), (2, 0), (0, 3), (2, 0, 3)])
def test_no_token_that_counts(lead, reduction, backend):
    ops = operands(lead)
    ops.labels.fill_(-100)
    weights = torch.randn(lead[0], dtype=torch.float64, requires_grad=True)
    options = {"reduction": reduction, "backend": backend}
    loss = call(lambda s, w: w / squared(s), ops, (weights,), per="sequence", **options)
    assert loss.shape == (lead[:1] if reduction == "none" else ())
    assert loss.eq(0).all()
    (loss.sum() * 3).backward()
    assert all(x.grad is not None and x.grad.eq(0).all() for x in leaves_of(ops, (weights,)))


@pytest.mark.slow_on("triton")
def test_under_no_grad(backend):
    ops, inputs = responses()
    expected = call(gspo, ops, inputs, per="sequence", want=WANT, backend=backend).detach()
    for budget in BUDGETS:
        with torch.no_grad():
            got = call(gspo, ops, inputs, per="sequence", want=WANT, memory_budget=budget, backend=backend)
        assert_near(got, expected, 1e-12, "loss")


@pytest.mark.parametrize("budget", BUDGETS)
def test_with_a_sparse_backward(budget):
    ops, inputs = responses()
    exact = call(gspo, ops, inputs, per="sequence", want=WANT, memory_budget=budget)
    ops.transform["sparse"] = sparse = SparseBackward(1e-12, width=4)
    got = call(gspo, ops, inputs, per="sequence", want=WANT, memory_budget=budget)
    assert_same(grads(got, ops, inputs), grads(exact, ops, inputs), 1e-9)
    assert sparse.skipped_mass is not None


@pytest.mark.parametrize(
    ("lead", "loss_fn", "inputs", "options", "error", "match"),
    [
        ((6,), squared, (), {}, ShapeError, r"per='sequence': expected hidden \(B, T, H\), .* got \(6, 5\)"),
        ((2, 3), squared, (), {"per": "response"}, OptionError, "per: expected 'token' or 'sequence', got 'response'"),
        ((2, 3), lambda s: s.logprob, (), {}, ShapeError, r"one loss per sequence, shape \(2,\), got .*\(2, 3\)"),
        ((2, 3), lambda s: s.logprob.sum(), (), {}, ShapeError, r"one loss per sequence, shape \(2,\), got .*\(\)"),
        ((2, 3), squared, (torch.zeros(3),), {}, ShapeError, r"inputs: expected leading dimensions \(2,\), got \(3,\)"),
        ((2, 3), lambda s: squared(s) * torch.ones(2, requires_grad=True), (), {}, GradientError, "captured"),
    ],
)
def test_what_is_refused(lead, loss_fn, inputs, options, error, match, backend):
    ops = operands(lead)
    with pytest.raises(LogitlessError, match=match) as caught:
        call(loss_fn, ops, inputs, backend=backend, **{"per": "sequence"} | options)
    assert isinstance(caught.value, error)
    assert "\n" not in str(caught.value)


N, H, V = 128, 16, 8192


@not_interpreted
def test_the_budget_holds_where_some_sequences_are_longer_than_a_chunk():
    """What the shorter ones took is gone before the longer ones' numbers are made."""
    ops, budget = operands((8, 256), H, V, dtype=torch.float32).training("hidden"), 2**22
    ops.labels[1:, 8:] = -100
    loss_fn = lambda s: (s.logprob + s.entropy).sum(1).square()  # noqa: E731

    def step():
        call(loss_fn, ops, per="sequence", want=WANT, memory_budget=budget).backward()

    step()
    assert trace_allocations(step).peak <= budget


@not_interpreted
@pytest.mark.parametrize(("budget", "materialised"), [(2**21, True), (2**18, False)])
@pytest.mark.parametrize("trainable", [("hidden", "weight", "bias"), ("hidden",), ()], ids=str)
def test_what_explain_says_and_the_budget_holds(trainable, budget, materialised, backend):
    ops = operands((8, N // 8), H, V, dtype=torch.float32).training(*trainable)
    hidden, head, labels = ops.hidden, ops.head, ops.labels
    told = ll.explain(hidden, head, labels, want=WANT, loss=True, per="sequence", memory_budget=budget, backend=backend)
    assert told.price.materialised == (materialised and bool(trainable))
    if trainable:
        assert told.price.gemms == 1 + ("weight" in trainable) + (1 if materialised else 2)

    def step():
        loss = ll.token_loss(
            *(lambda s: (s.logprob + s.entropy).sum(1).square(), hidden, head, labels),
            per="sequence",
            want=WANT,
            memory_budget=budget,
            backend=backend,
        )
        if trainable:
            loss.backward()

    step()
    traced = trace_allocations(step)
    kept = 4 * sum(x.numel() for x in ops.leaves.values())
    assert traced.peak <= budget + 2 * kept + 4 * N * 160 < 4 * N * V + 2 * kept
