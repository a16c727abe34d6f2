"""The edges of the domain: impossible entries, extreme logits, ties, one entry, no token, NaN."""

import pytest
import torch

import logitless as ll
from logitless.algebra.rules import COLDEST
from logitless.errors import GradientError
from logitless.vocab.reference import dense_token_stats
from tests.support.vocab.comparing import (
    ALONE,
    EVERYTHING,
    INTEGERS,
    PAIRED,
    Operands,
    assert_near_in_norm,
    compare,
    operands,
)

DTYPES = [torch.float64, torch.float32]
BUDGETS = [None, 60_000]
FINITE_WHERE_IMPOSSIBLE = ("logprob", "logsumexp", "entropy", "max_logit", "sum_sq_prob", "rank")


@pytest.mark.halved
@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("impossible", [[3], [0, 502], list(range(400)), list(range(50, 503)), list(range(1, 502))])
def test_impossible_entries(impossible, budget, dtype, backend):
    """-inf bias entries: single ones, and whole slices at the start, in the middle and at the end."""
    ops = operands((9,), 7, 503, dtype=dtype, reference=True)
    possible = torch.tensor([i for i in range(503) if i not in set(impossible)])
    ops.labels = possible[torch.randint(len(possible), (9,))]
    for biases in ((ops.bias,), (ops.bias, ops.ref.bias)):
        with torch.no_grad():
            for bias in biases:
                bias[impossible] = -torch.inf
        finite = ("kl", "jsd") if len(biases) == 1 else PAIRED
        options = {"memory_budget": budget, "backend": backend}
        compare(ops, (*FINITE_WHERE_IMPOSSIBLE, *finite), top_k=2, **options)
        compare(ops, FINITE_WHERE_IMPOSSIBLE, candidates=ops.labels[:, None], temperature=0.7, **options)
        for frozen in (("hidden",), ("weight", "bias")):
            compare(ops.training(*frozen), ("logprob", "kl"), **options)


@pytest.mark.parametrize("own", [-2e30, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("other", [None, -2e30, torch.finfo(torch.float32).min])
def test_gradients_where_entries_are_impossible(own, other, backend):
    """A probability of 0 times its own logarithm, or a ratio's, is 0, under an upstream gradient of any size."""
    wants = FINITE_WHERE_IMPOSSIBLE[:-1] if other is None else ("kl", "jsd")
    for name in wants:
        ops = operands((5,), 7, 67, dtype=torch.float32, reference=other is not None)
        ops.labels = torch.arange(1, 6)
        with torch.no_grad():
            ops.bias[[0, 40]] = own
            if ops.ref is not None:
                ops.ref.bias[[0, 40]] = other
        exact = ops.to(torch.float64)
        options = {"want": (name,), "reference": ops.reference, "backend": backend}
        got = getattr(ll.token_stats(ops.hidden, ops.head, ops.labels, **options), name)
        expected = dense_token_stats(exact.hidden, exact.head, ops.labels, want=(name,), reference=exact.reference)[
            name
        ]
        ours = torch.autograd.grad(1e6 * got.sum(), list(ops.leaves.values()))
        theirs = torch.autograd.grad(1e6 * expected.sum(), list(exact.leaves.values()))
        for x, y in zip(ours, theirs, strict=True):
            assert_near_in_norm(x, y, 4e-5, name, floor=4.0)


def test_a_large_upstream_gradient_of_entropy_leaves_the_label_a_number(backend):
    """It stands outside of its slice as a logit of -1e30, of which float32 does not hold so large a multiple."""
    ops = operands((5,), 7, 67, bias=False, dtype=torch.float32)
    entropy = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("entropy",), backend=backend).entropy.sum()
    once = torch.autograd.grad(entropy, (ops.hidden, ops.weight), retain_graph=True)
    for x, y in zip(once, torch.autograd.grad(2.0**34 * entropy, (ops.hidden, ops.weight)), strict=True):
        assert torch.equal(y, 2.0**34 * x)


MASKS = [-30.0, -1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf]
MASKED = {"first": [0], "last": [502], "head": range(250), "tail": range(250, 503), "some": range(0, 503, 5)}


@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("budget", [None, 4_000])
def test_divergences_of_masked_heads(masked, budget, backend):
    """A mask of any size, at either end, in either head: no outlier takes the digits of the others."""
    for size in MASKS:
        for who in ("policy", "reference", "both"):
            ops = operands((5,), 7, 503, dtype=torch.float32, spread=2.0).training()
            weight = ops.weight + 0.01 * torch.randn_like(ops.weight)
            ops.ref = Operands(ops.hidden.clone(), weight, ops.bias.clone(), None)
            with torch.no_grad():
                for of, bias in (("reference", ops.bias), ("policy", ops.ref.bias)):
                    if who != of:
                        bias[list(masked)] = size
            exact = ops.to(torch.float64)
            options = {"want": ("kl", "reverse_kl"), "reference": ops.reference, "memory_budget": budget}
            got = ll.token_stats(*(ops.hidden, ops.head), **options, backend=backend)
            expected = dense_token_stats(exact.hidden, exact.head, want=options["want"], reference=exact.reference)
            for name, value in expected.items():
                ours = getattr(got, name).double()
                ours, value = (x.clamp(max=1e35) for x in (ours, value))  # a sum of larger ones is infinite in fp32
                where = f"{name} {size} {who}: "
                torch.testing.assert_close(ours, value, rtol=1e-5, atol=1e-5, msg=lambda m, s=where: s + m)


@pytest.mark.parametrize("size", [-1e4, -1e30, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("want", ["jsd", "kl_mixture", "reverse_kl_mixture", "acceptance", "total_variation"])
def test_heads_that_have_no_entry_in_common_at_first(want, size, backend):
    """What each has alone in the slices before the first common entry is measured from no d0 of its own."""
    ops = operands((5,), 7, 512, dtype=torch.float32, reference=True)
    with torch.no_grad():
        ops.ref = Operands(ops.hidden.clone(), ops.weight + 0.1 * torch.randn_like(ops.weight), ops.bias + 0.3, None)
        ops.bias[:128], ops.ref.bias[128:256] = size, size
        ops.bias[128:256] -= 3
        ops.ref.bias[:128] -= 3
    exact = ops.to(torch.float64)
    options = {"want": (want,), "reference": ops.reference, "memory_budget": 20_000}
    got = getattr(ll.token_stats(ops.hidden, ops.head, **options, backend=backend), want)
    expected = dense_token_stats(exact.hidden, exact.head, want=(want,), reference=exact.reference)[want]
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    leaves = ops.weight, exact.weight
    ours, theirs = (torch.autograd.grad(x.sum(), leaf)[0] for x, leaf in zip((got, expected), leaves, strict=True))
    assert_near_in_norm(ours, theirs, 2e-5, want)


@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
@pytest.mark.parametrize("size", [-1e29, -2e30, torch.finfo(torch.float32).min / 2])
def test_gradients_of_a_divergence_to_a_mask(size, trainable, backend):
    """What the policy hardly gives to an entry that the reference masks, times the mask, is most of the gradient."""
    ops = operands((5,), 7, 503, dtype=torch.float32, reference=True).training(*trainable)
    with torch.no_grad():
        ops.bias[7], ops.ref.bias[7] = -72, size
    exact = ops.to(torch.float64).training(*trainable)
    got = ll.token_stats(ops.hidden, ops.head, want=("kl",), reference=ops.reference, backend=backend).kl.sum()
    expected = dense_token_stats(exact.hidden, exact.head, want=("kl",), reference=exact.reference)["kl"].sum()
    leaves = list(ops.leaves.values()), list(exact.leaves.values())
    for ours, theirs in zip(
        *(torch.autograd.grad(*pair) for pair in zip((got, expected), leaves, strict=True)), strict=True
    ):
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
def test_what_was_infinite_may_weigh_nothing_later(trainable, backend):
    """The reference's -inf entry has all of the policy's mass in the first slice, and none of it in the end."""
    ops = operands((5,), 7, 503, dtype=torch.float32, reference=True).training(*trainable)
    with torch.no_grad():
        ops.bias[0] = ops.ref.bias[0] = 5
        ops.bias[400:] += 300
        ops.ref.bias[400:] += 300
        ops.bias[1], ops.ref.bias[2] = -torch.inf, -torch.inf

    def values_and_gradients():
        stats = ll.token_stats(
            *(ops.hidden, ops.head),
            want=("kl", "reverse_kl"),
            reference=ops.reference,
            memory_budget=4_000,
            backend=backend,
        )
        leaves = list(ops.leaves.values())
        both = stats.kl, stats.reverse_kl
        return [*both, *(g for x in both for g in torch.autograd.grad(x.sum(), leaves, retain_graph=True))]

    got = values_and_gradients()
    with torch.no_grad():
        ops.bias[1] = ops.ref.bias[2] = 0  # what weighs nothing, finite
    for a, b in zip(got, values_and_gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_infinite_results(budget, backend):
    """What is infinitely far is +inf, not NaN."""
    ops = operands((9,), 7, 503, dtype=torch.float32, reference=True)
    ops.labels[:] = 1
    ops.labels[4] = 300
    options = {"reference": ops.reference, "memory_budget": budget, "backend": backend}
    with torch.no_grad():
        ops.bias[300] = -torch.inf
        got = ll.token_stats(*(ops.hidden, ops.head, ops.labels), want=EVERYTHING, **options)
        assert got.reverse_kl.eq(torch.inf).all()
        assert got.self_certainty.eq(torch.inf).all()
        assert got.mean_logit.eq(-torch.inf).all()
        assert got.logprob[4] == got.label_logit[4] == -torch.inf
        assert got.rank[4] == 503
        assert got.logprob[[0, 8]].isfinite().all()
        ops.bias[300], ops.ref.bias[300] = 0, -torch.inf
        got = ll.token_stats(*(ops.hidden, ops.head, ops.labels), want=PAIRED, **options)
        assert got.kl.eq(torch.inf).all()
        assert got.reverse_kl.isfinite().all()
        assert got.jsd.isfinite().all()


UNDEFINED = ("logprob", "entropy", "self_certainty", "sum_sq_prob", "kl", "reverse_kl")


@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
@pytest.mark.parametrize("labelled", [True, False])
def test_an_infinite_divergence_that_a_loss_leaves_out_has_no_gradient(labelled, trainable, backend):
    """0·inf = 0: at labels too, and where the head is frozen."""
    ops = operands((5,), 7, 67, reference=True).training(*trainable)
    with torch.no_grad():
        ops.ref.bias[ops.labels] = -torch.inf
    labels = ops.labels if labelled else None
    options = {"want": ("kl", "logsumexp"), "reference": ops.reference, "backend": backend}
    stats = ll.token_stats(ops.hidden, ops.head, labels, **options)
    assert stats.kl.isposinf().all()
    leaves = list(ops.leaves.values())
    found = torch.autograd.grad((stats.logsumexp + torch.where(stats.kl.isinf(), 0, stats.kl)).sum(), leaves)
    alone = ll.token_stats(ops.hidden, ops.head, labels, want=("logsumexp",), backend=backend).logsumexp.sum()
    for ours, theirs in zip(found, torch.autograd.grad(alone, leaves), strict=True):
        assert_near_in_norm(ours, theirs, 1e-10)


@pytest.mark.parametrize("mask", [-torch.inf, -1e30])
@pytest.mark.parametrize("budget", [None, 4_000])
def test_rows_without_a_possible_entry(budget, mask, backend):
    """Every logit is masked: maximum and log-sum-exp are -inf, and what takes probabilities is NaN, as torch's own."""
    ops = operands((5,), 7, 503, dtype=torch.float32, reference=True).training()
    with torch.no_grad():
        ops.bias[:] = mask
    got = ll.token_stats(
        *(ops.hidden, ops.head, ops.labels),
        want=(*UNDEFINED, "logsumexp", "max_logit", "rank"),
        top_k=70,
        reference=ops.reference,
        memory_budget=budget,
        backend=backend,
    )
    assert got.logsumexp.eq(-torch.inf).all()
    assert got.max_logit.eq(-torch.inf).all()
    assert got.rank.eq(1).all()
    assert (got.top_k_logits <= mask).all()
    assert got.top_k_ids.eq(torch.arange(70)).all()
    for name in UNDEFINED:
        assert getattr(got, name).isnan().all(), name


@pytest.mark.parametrize("who", ["policy", "reference", "both"])
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("budget", [None, 4_000])
def test_no_distance_from_a_head_without_a_possible_entry(budget, labelled, who, backend):
    ops = operands((5,), 7, 503, dtype=torch.float32, reference=True).training()
    with torch.no_grad():
        for bias, other in ((ops.bias, "reference"), (ops.ref.bias, "policy")):
            if who != other:
                bias[:] = -torch.inf
    options = {"want": PAIRED, "reference": ops.reference, "memory_budget": budget, "backend": backend}
    got = ll.token_stats(ops.hidden, ops.head, ops.labels if labelled else None, **options)
    for name in PAIRED:
        assert getattr(got, name).isnan().all(), name


@pytest.mark.parametrize("want", ["label_logit", "max_logit", "mean_logit"])
def test_logits_have_their_gradient_where_no_entry_is_possible(want, backend):
    """They take no probability, so none is NaN in their gradient."""
    ops = operands((5,), 7, 67)
    with torch.no_grad():
        ops.bias[:] = -torch.inf
    compare(ops, (want,), backend=backend)


@pytest.mark.parametrize("budget", [None, 3_000, 60_000])
@pytest.mark.parametrize("top_k", [8, 100])
def test_impossible_entries_are_ordered_by_id(top_k, budget, backend):
    ops = operands((5,), 7, 503, dtype=torch.float32).training()
    possible = [3, 77, 490]
    with torch.no_grad():
        ops.bias[[i for i in range(503) if i not in possible]] = -torch.inf
    got = ll.token_stats(ops.hidden, ops.head, want=(), top_k=top_k, memory_budget=budget, backend=backend).top_k_ids
    lowest = [i for i in range(503) if i not in possible][: top_k - 3]
    assert got[:, :3].sort(1).values.tolist() == [possible] * 5
    assert got[:, 3:].tolist() == [lowest] * 5


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
def test_gradient_of_an_impossible_label(trainable, budget, backend):
    ops = operands((5,), 7, 503).training(*trainable)
    with torch.no_grad():
        ops.bias[[0, 300]] = -torch.inf
    ops.labels = torch.tensor([0, 1, 300, 2, 502])
    compare(ops, ("logprob",), memory_budget=budget, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("label", [0, -1])
def test_labels_at_both_ends(label, budget, dtype, backend):
    ops = operands((9,), 7, 503, dtype=dtype)
    ops.labels[:] = label % 503
    compare(ops, ALONE, memory_budget=budget, backend=backend)


@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("spread", [300.0, 1e4])
def test_extreme_logits(spread, budget, backend):
    compare(operands((9,), 7, 503, spread=spread, reference=True), EVERYTHING, memory_budget=budget, backend=backend)
    ops = operands((9,), 7, 503, dtype=torch.float32, spread=spread, reference=True)
    ops.labels = ops.hidden.detach().matmul(ops.weight.detach().T).argmax(-1)
    compare(ops, ("entropy", "max_logit", "label_logit"), memory_budget=budget, backend=backend, tolerance=1e-3)
    stats = ll.token_stats(
        *(ops.hidden, ops.head, ops.labels), want=EVERYTHING, reference=ops.reference, backend=backend
    )
    for name in EVERYTHING:
        value = getattr(stats, name)
        assert value.isfinite().all(), name
        if name not in INTEGERS:
            for grad in torch.autograd.grad(value.sum(), list(ops.leaves.values()), retain_graph=True):
                assert grad.isfinite().all(), name


@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("budget", BUDGETS)
def test_ties(budget, backend):
    """Logits that are equal to the last bit: the rank counts the strictly greater, one entry is the best."""
    ops = operands((31,), 3, 503, dtype=torch.float32)
    with torch.no_grad():
        ops.hidden.copy_(torch.randint(-2, 3, ops.hidden.shape))
        ops.weight.copy_(torch.randint(-2, 3, ops.weight.shape))
        ops.bias.zero_()
    z = (ops.hidden @ ops.weight.T).detach()
    z_label = z.gather(-1, ops.labels[:, None])
    options = {"want": ("rank", "max_logit"), "top_k": 6, "memory_budget": budget, "backend": backend}
    got = ll.token_stats(*(ops.hidden, ops.head, ops.labels), **options)
    assert torch.equal(got.rank, 1 + (z > z_label).sum(-1))
    assert torch.equal(got.top_k_logits, z.topk(6).values)
    assert torch.equal(z.gather(-1, got.top_k_ids), got.top_k_logits)
    assert all(len(set(row)) == 6 for row in got.top_k_ids.tolist())
    for row in range(31):
        (grad,) = torch.autograd.grad(got.max_logit[row], ops.bias, retain_graph=True)
        assert grad.sum() == grad.max() == 1
        assert z[row, grad.argmax()] == z[row].max()


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_best_label_has_rank_one(budget, backend):
    """However z[label] is computed, rounding does not make it greater than itself."""
    ops = operands((200,), 65, 503, dtype=torch.float32)
    ops.labels = (ops.hidden @ ops.weight.T + ops.bias).argmax(-1)
    got = ll.token_stats(*(ops.hidden, ops.head, ops.labels), want=("rank",), memory_budget=budget, backend=backend)
    assert got.rank.eq(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocabulary_of_one(dtype, backend):
    ops = operands((4,), 3, 1, dtype=dtype, reference=True)
    compare(ops, EVERYTHING, top_k=1, candidates=torch.zeros(4, 2, dtype=torch.int64), backend=backend)
    compare(ops.training("hidden"), EVERYTHING, backend=backend)


NOTHING = {"no token": (0,), "no sequence": (0, 5), "no position": (3, 0), "all ignored": (3, 2), "one ignored": ()}


@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
@pytest.mark.parametrize("lead", NOTHING.values(), ids=NOTHING)
def test_nothing_to_do(lead, trainable, backend):
    ops = operands(lead, reference=True).training(*trainable)
    ops.labels[...] = -100
    options = {"candidates": torch.zeros(*lead, 3, dtype=torch.int64), "reference": ops.reference}
    stats = ll.token_stats(*(ops.hidden, ops.head, ops.labels), want=EVERYTHING, top_k=2, backend=backend, **options)
    for name in EVERYTHING:
        assert getattr(stats, name).shape == lead
        assert getattr(stats, name).eq(0).all()
    assert stats.top_k_ids.shape == stats.top_k_logits.shape == (*lead, 2)
    assert stats.top_k_ids.eq(-1).all()
    assert stats.candidate_logits.shape == (*lead, 3)
    losses = [
        ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend=backend),
        ll.token_loss(lambda s: -s.logprob, ops.hidden, ops.head, ops.labels, backend=backend),
        stats.logprob.sum() + stats.entropy.sum() + stats.kl.sum(),
    ]
    for loss in losses:
        assert loss == 0
        for x, grad in zip(ops.leaves.values(), torch.autograd.grad(loss, list(ops.leaves.values())), strict=True):
            assert grad.shape == x.shape
            assert grad.eq(0).all()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
def test_nan_stays_in_its_row(trainable, budget, backend):
    ops = operands((9,), 7, 503, reference=True).training(*trainable)
    options = {"top_k": 2, "reference": ops.reference, "memory_budget": budget, "backend": backend}
    clean = ll.token_stats(*(ops.hidden, ops.head, ops.labels), want=EVERYTHING, **options)
    with torch.no_grad():
        ops.hidden[3] = torch.nan
    others = torch.arange(9) != 3
    stats = ll.token_stats(*(ops.hidden, ops.head, ops.labels), want=EVERYTHING, **options)
    for name in EVERYTHING:
        value = getattr(stats, name)
        torch.testing.assert_close(value[others], getattr(clean, name)[others], rtol=1e-12, atol=1e-12)
        assert name in INTEGERS or value[3].isnan(), name
    assert torch.equal(stats.top_k_ids[others], clean.top_k_ids[others])
    (grad,) = torch.autograd.grad(stats.logprob.sum() + stats.entropy.sum() + stats.kl.sum(), ops.hidden)
    assert grad[others].isfinite().all()
    assert grad[3].isnan().all()


def test_negative_logits_at_the_lowest_temperature(backend):
    """Logits of -5e5, divided by it, are still possible ones."""
    hidden, head = torch.ones(1, 1), ll.LMHead(torch.tensor([[-4e5], [-4.5e5]]))
    want = ("logprob", "entropy", "logsumexp")
    got = ll.token_stats(hidden, head, torch.tensor([0]), want=want, temperature=COLDEST, backend=backend)
    assert (got.logprob.item(), got.entropy.item()) == (0.0, 0.0)
    assert got.logsumexp.item() == pytest.approx(-4e5 / COLDEST)


@pytest.mark.parametrize("ranks", [(), (2, 3)], ids=str)
def test_nan_in_an_ignored_row_reaches_nothing(ranks, backend):
    ops = operands((9,), reference=True, ranks=ranks)
    ops.labels[3] = -100
    with torch.no_grad():
        ops.hidden[3] = ops.ref.hidden[3] = torch.nan
    compare(ops, EVERYTHING, top_k=2, backend=backend)
    compare(ops.training("hidden"), EVERYTHING, top_k=2, backend=backend)


def test_no_candidates_have_a_gradient(backend):
    ops = operands((5,), 7, 503, dtype=torch.float32)
    none = torch.zeros(5, 0, dtype=torch.int64)
    got = ll.token_stats(ops.hidden, ops.head, candidates=none, want=("logsumexp",), backend=backend)
    assert got.candidate_logits.shape == (5, 0)
    for x in torch.autograd.grad(got.candidate_logits.sum(), list(ops.leaves.values())):
        assert x.eq(0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_second_backward_has_the_bits_of_the_first(reduction, backend):
    ops = operands((9,), 7, 503)
    call = ops.hidden, ops.head, ops.labels
    for loss in (
        ll.linear_cross_entropy(*call, reduction=reduction, memory_budget=20_000, backend=backend),
        ll.token_loss(
            lambda s: s.entropy - s.logprob, *call, want=("entropy", "logprob"), reduction=reduction, backend=backend
        ),
    ):
        first, second = (torch.autograd.grad(loss * 0.3, list(ops.leaves.values()), retain_graph=True) for _ in "ab")
        assert all(map(torch.equal, first, second))


def test_several_upstream_gradients_at_once_are_refused_in_one_line(backend):
    ops = operands((3,), 7, 503)
    call = ops.hidden, ops.head, ops.labels
    logprob = ll.token_stats(*call, backend=backend).logprob
    with pytest.raises(GradientError, match="expected one upstream gradient"):
        torch.autograd.grad(logprob, ops.hidden, torch.eye(3, dtype=logprob.dtype), is_grads_batched=True)
    loss = ll.linear_cross_entropy(*call, backend=backend)
    with pytest.raises(GradientError, match="expected one upstream gradient"):
        torch.autograd.grad(loss, ops.hidden, torch.ones(2, dtype=loss.dtype), is_grads_batched=True)
