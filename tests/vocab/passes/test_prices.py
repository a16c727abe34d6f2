"""What each call pays, in matrix products of 2·N·H·V flop, counted as they run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless import losses
from logitless.algebra.stats import STATISTICS
from logitless.vocab.backends.logits import weight_sum
from logitless.vocab.passes import engine
from tests.support.vocab.comparing import EVERYTHING, Operands, compare, operands
from tests.support.vocab.measuring import measure

pytestmark = [pytest.mark.slow_on("triton"), pytest.mark.usefixtures("in_slices")]
N, H, V = 96, 48, 4096
BUDGETS = [None, 300_000]  # whole logits are 1.5 MB
TRAINABLE, FROZEN = ("hidden", "weight", "bias"), ("hidden",)


def problem(*trainable: str, reference: bool = False, **transform) -> Operands:
    ops = operands((N,), H, V, dtype=torch.float32, reference=reference, **transform).training(*trainable)
    if ops.ref is not None:  # as wide as the policy, so that its product costs the same
        ops.ref.hidden, ops.ref.weight = torch.randn(N, H), torch.randn(V, H) / H**0.5
    return ops


def again(want, budget) -> int:
    """The products that a second look makes: those of both heads, where rows of few tokens would fit."""
    return 2 if budget and any(STATISTICS[name].looks == 2 for name in want) else 0


def price(fn) -> float:
    return measure(fn).flops / (2 * N * H * V)


def assert_price(got: float, expected: int) -> None:
    """To 3 %, which is what labels, biases and peaks may cost."""
    assert abs(got - expected) < 0.03 * max(expected, 1), f"{got:.3f} matrix products instead of {expected}"


def stats_step(ops: Operands, want, budget, backend, **options):
    def step():
        stats = ll.token_stats(
            *(ops.hidden, ops.head, ops.labels),
            want=want,
            reference=ops.reference,
            memory_budget=budget,
            backend=backend,
            **options,
        )
        if ops.leaves:
            up = torch.rand(N)
            outputs = [getattr(stats, name) for name in want]
            torch.autograd.grad(outputs, list(ops.leaves.values()), [up] * len(outputs))

    return step


def loss_step(ops: Operands, loss_fn, want, budget, backend, **options):
    def step():
        loss = ll.token_loss(
            *(loss_fn, ops.hidden, ops.head, ops.labels),
            want=want,
            reference=ops.reference,
            memory_budget=budget,
            backend=backend,
            **options,
        )
        if ops.leaves:
            torch.autograd.grad(loss, list(ops.leaves.values()), torch.rand_like(loss))

    return step


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"softcap": 5.0, "scale": 0.5}], ids=str)
def test_values_cost_one(options, budget, backend):
    ops = problem(**options)
    alone = ("logprob", "logsumexp", "entropy", "self_certainty", "mean_logit", "max_logit", "sum_sq_prob")
    assert_price(price(stats_step(ops, alone, budget, backend)), 1)
    assert_price(price(stats_step(ops, ("logprob",), budget, backend, top_k=5)), 1)
    assert_price(price(stats_step(ops, ("logprob", "rank"), budget, backend)), 1)


@pytest.mark.parametrize("budget", BUDGETS)
def test_values_under_no_grad_cost_one(budget, backend):
    ops = problem(*TRAINABLE)
    with torch.no_grad():
        step = lambda: ll.token_stats(  # noqa: E731
            *(ops.hidden, ops.head, ops.labels), memory_budget=budget, backend=backend
        )
        assert_price(price(step), 1)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "want", [("kl",), ("logprob", "entropy", "self_certainty", "kl"), ("jsd",), ("acceptance",), EVERYTHING], ids=str
)
def test_values_with_a_reference_cost_two(want, budget, backend):
    assert_price(price(stats_step(problem(reference=True), want, budget, backend)), 2 + again(want, budget))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("want", "softcap", "expected"),
    [
        (("logprob",), None, 2),
        (("logsumexp",), None, 2),
        (("logprob", "logsumexp", "self_certainty"), None, 2),
        (("entropy",), None, 3),
        (("logprob", "entropy"), None, 3),
        (("sum_sq_prob",), None, 3),
        (("logprob", "entropy", "sum_sq_prob"), None, 3),
        (("logprob",), 5.0, 2),
        (("logprob", "self_certainty"), 5.0, 3),  # a softcap makes the mean logit's gradient a basis of its own
        (("logprob", "entropy"), 5.0, 3),
    ],
    ids=str,
)
def test_frozen_head(want, softcap, expected, budget, backend):
    ops = problem(*FROZEN, softcap=softcap)
    assert_price(price(stats_step(ops, want, budget, backend)), expected)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("want", "expected"),
    [
        (("kl",), 4),
        (("logprob", "kl"), 4),
        (("reverse_kl",), 4),
        (("logprob", "entropy", "kl"), 5),
        (("jsd",), 5),
        (("acceptance", "total_variation"), 5),
    ],
    ids=str,
)
def test_frozen_head_with_a_reference(want, expected, budget, backend):
    """One more than without where the logits are seen once, two more where they are recomputed."""
    ops = problem(*FROZEN, reference=True)
    assert price(stats_step(ops, want, budget, backend)) < (expected + again(want, budget)) * 1.03


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("want", [("logprob",), ("logprob", "entropy", "self_certainty", "sum_sq_prob")], ids=str)
def test_trainable_head_with_any_upstream_costs_four(want, budget, backend):
    assert_price(price(stats_step(problem(*TRAINABLE), want, budget, backend)), 4)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("want", [("kl",), ("logprob", "entropy", "kl", "jsd"), ("acceptance",)], ids=str)
def test_trainable_head_with_any_upstream_and_a_reference_costs_six(want, budget, backend):
    step = stats_step(problem(*TRAINABLE, reference=True), want, budget, backend)
    assert_price(price(step), 6 + again(want, budget))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("trainable", "expected"), [(TRAINABLE, 3), (FROZEN, 2), (("weight",), 2), ((), 1)], ids=str)
def test_token_loss(trainable, expected, reduction, budget, backend):
    ops = problem(*trainable)
    step = loss_step(
        *(ops, lambda s: -s.logprob - 0.1 * s.entropy + s.sum_sq_prob, ("logprob", "entropy", "sum_sq_prob")),
        *(budget, backend),
        reduction=reduction,
    )
    assert_price(price(step), expected)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("trainable", "expected"), [(TRAINABLE, 4), (FROZEN, 3), ((), 2)], ids=str)
def test_token_loss_with_a_reference(trainable, expected, budget, backend):
    ops = problem(*trainable, reference=True)
    old = torch.rand(N)

    def loss_fn(s, old):
        return losses.ppo_clip(s.logprob, old, torch.ones_like(old)) - 0.01 * s.entropy + 0.1 * s.kl

    step = loss_step(ops, loss_fn, ("logprob", "entropy", "kl"), budget, backend, inputs=(old,))
    assert_price(price(step), expected)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("trainable", "expected"), [(TRAINABLE, 4), (FROZEN, 2)], ids=str)
def test_token_loss_of_every_token_pays_for_any_upstream(trainable, expected, budget, backend):
    step = loss_step(problem(*trainable), lambda s: -s.logprob, ("logprob",), budget, backend, reduction="none")
    assert_price(price(step), expected)


@pytest.mark.parametrize(
    ("budget", "trainable", "expected"),
    [
        *((None, trainable, price) for trainable, price in ((TRAINABLE, 3), (FROZEN, 2), ((), 1))),
        *((50_000, trainable, price) for trainable, price in ((TRAINABLE, 4), (FROZEN, 2), ((), 1))),
    ],
    ids=str,
)
def test_token_loss_of_sequences_pays_more_where_one_is_more_than_a_chunk(trainable, expected, budget, backend):
    """Rows of logits of 16 tokens are 262 kB."""
    ops = problem(*trainable)
    ops.hidden = ops.hidden.detach().view(-1, 16, H).requires_grad_("hidden" in trainable)
    ops.labels = ops.labels.view(-1, 16)
    step = loss_step(ops, lambda s: s.logprob.sum(1).square(), ("logprob",), budget, backend, per="sequence")
    assert_price(price(step), expected)
    told = ll.explain(
        ops.hidden, ops.head, ops.labels, loss=True, per="sequence", memory_budget=budget, backend=backend
    )
    assert told.price.gemms == expected


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("trainable", "expected"), [(TRAINABLE, 3), (FROZEN, 2), ((), 1)], ids=str)
def test_linear_cross_entropy(trainable, expected, budget, backend):
    ops = problem(*trainable)

    def step():
        loss = ll.linear_cross_entropy(
            *(ops.hidden, ops.head, ops.labels),
            label_smoothing=0.1,
            z_loss=1e-4,
            memory_budget=budget,
            backend=backend,
        )
        if ops.leaves:
            torch.autograd.grad(loss, list(ops.leaves.values()))

    assert_price(price(step), expected)


def test_ignored_tokens_cost_nothing(backend):
    ops = problem(*TRAINABLE)
    ops.labels[: 2 * N // 3] = -100
    assert_price(3 * price(stats_step(ops, ("logprob",), 300_000, backend)), 4)
    ops.labels[:] = -100
    assert price(stats_step(ops, ("logprob",), 300_000, backend)) < 0.01


def test_padded_rows_cost_nothing(backend):
    ops = problem(*TRAINABLE, vocab_size=V // 2)
    assert_price(2 * price(stats_step(ops, ("logprob",), 300_000, backend)), 4)


def test_a_smaller_budget_means_more_slices(backend):
    ops = problem(*TRAINABLE)
    step = [measure(stats_step(ops, ("logprob",), budget, backend)).products for budget in (100_000, 300_000, None)]
    assert step[0] > step[1] > step[2]


def test_torchs_own_counter_agrees(backend):
    """FlopCounterMode does not see in-place products, so it may find fewer, never more."""
    ops = problem(*TRAINABLE)
    for step, expected in (
        (stats_step(ops, ("logprob",), None, backend), 4),
        (loss_step(ops, lambda s: -s.logprob, ("logprob",), None, backend), 3),
    ):
        with FlopCounterMode(display=False) as counter:
            step()
        assert counter.get_total_flops() / (2 * N * H * V) < 1.03 * expected


@pytest.mark.parametrize(("n", "sums"), [(H // 8, 0), (H // 8 + 1, 1)])
def test_few_tokens_do_not_read_the_head_once_more_for_their_mean_logit(n, sums, monkeypatch):
    ops = operands((n,), H, V, dtype=torch.float32).training("hidden")
    read = []
    monkeypatch.setattr(engine, "weight_sum", lambda *args: read.append(1) or weight_sum(*args))
    compare(ops, ("logprob", "mean_logit", "self_certainty"), backend="eager")
    assert len(read) == sums + 1  # and once for backward
