"""Every statistic, its value and its gradient, for every shape and option, against the oracle."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import logitless as ll
from logitless.errors import GradientError
from logitless.vocab.reference import dense_logits
from tests.support.vocab.comparing import ALONE, EVERYTHING, FIXED, PAIRED, all_at_once, compare, operands

DTYPES = [torch.float64, torch.float32]
BUDGETS = [None, 30_000, 200_000]  # bytes: whole rows, slices of some and of all tokens that do not divide V


@pytest.mark.halved
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", EVERYTHING + FIXED)
def test_each_statistic(name, budget, dtype, backend):
    ops = operands((13,), 7, 1031, dtype=dtype, reference=name in PAIRED)
    compare(ops, (name,), memory_budget=budget, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_all_statistics_at_once(budget, dtype, backend):
    ops, options = all_at_once(dtype, budget)
    compare(ops, EVERYTHING, backend=backend, **options)


@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("trainable", [("hidden", "weight", "bias"), ("hidden",)])
@pytest.mark.parametrize("budget", [1, 50, 400])
def test_the_smallest_slices(budget, trainable, backend):
    ops = operands((5,), 3, 43, reference=True).training(*trainable)
    compare(ops, EVERYTHING, top_k=5, memory_budget=budget, backend=backend)
    compare(ops, ("logprob", "entropy"), memory_budget=budget, backend=backend)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (6,), (2, 3), (2, 1, 4)])
def test_leading_dimensions(lead, reference, backend):
    ops = operands(lead, reference=reference)
    want = EVERYTHING if reference else ALONE
    candidates = torch.randint(23, (*lead, 2))
    compare(ops, want, top_k=3, candidates=candidates, backend=backend)


@pytest.mark.parametrize(("n", "h", "v"), [(1, 1, 1), (1, 1, 2), (3, 1, 7), (17, 33, 129), (65, 3, 257), (2, 130, 5)])
def test_ragged_sizes(n, h, v, backend):
    compare(operands((n,), h, v, reference=True), EVERYTHING, top_k=min(v, 4), backend=backend)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "transform",
    [
        {"scale": 0.3},
        {"softcap": 4.0},
        {"scale": 1.7, "softcap": 2.5},
        {"vocab_size": 997},
        {"scale": 0.6, "softcap": 3.0, "vocab_size": 1030},
    ],
    ids=str,
)
def test_head_transforms(transform, budget, backend):
    ops = operands((6,), 7, 1031, reference=True, **transform)
    options = {"top_k": 4, "candidates": torch.randint(900, (6, 3)), "temperature": 1.6}
    compare(ops, EVERYTHING, memory_budget=budget, backend=backend, **options)


def test_padded_rows_do_not_exist(backend):
    ops = operands((6,), v=23, vocab_size=20, reference=True)
    with torch.no_grad():
        ops.weight[20:] = ops.bias[20:] = torch.nan
        ops.ref.weight[20:] = ops.ref.bias[20:] = 1e9
    stats = ll.token_stats(
        *(ops.hidden, ops.head, ops.labels),
        want=EVERYTHING,
        reference=ops.reference,
        top_k=20,
        backend=backend,
    )
    assert stats.top_k_ids.max() < 20
    sum(getattr(stats, name).sum() for name in EVERYTHING).backward()
    assert ops.weight.grad.shape == ops.weight.shape
    for x in ops.leaves.values():
        assert x.grad.isfinite().all()
    assert ops.weight.grad[20:].eq(0).all()
    assert ops.bias.grad[20:].eq(0).all()


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(
    "temperature",
    [0.3, 2, torch.tensor(0.7), torch.rand(5) + 0.5, torch.rand(3, 1) + 0.5, torch.rand(3, 5) + 0.5],
)
def test_temperature(temperature, reference, backend):
    ops = operands((3, 5), reference=reference)
    ops.labels[1, 2] = -100
    want = EVERYTHING if reference else ALONE
    compare(ops, want, temperature=temperature, top_k=2, candidates=torch.randint(23, (3, 5, 2)), backend=backend)


def test_temperature_has_no_gradient(backend):
    """Silently none would be a lost gradient."""
    ops = operands()
    temperature = torch.full((7,), 1.5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(GradientError, match="temperature"):
        ll.token_stats(*(ops.hidden, ops.head, ops.labels), temperature=temperature, backend=backend)
    with torch.no_grad():
        ll.token_stats(*(ops.hidden, ops.head, ops.labels), temperature=temperature, backend=backend)


def test_the_reference_is_a_constant(backend):
    ops = operands(reference=True)
    ops.ref = ops.ref.training("hidden", "weight", "bias")
    stats = ll.token_stats(*(ops.hidden, ops.head, ops.labels), want=PAIRED, reference=ops.reference, backend=backend)
    (stats.kl + stats.reverse_kl + stats.jsd).sum().backward()
    assert all(x.grad is None for x in ops.ref.leaves.values())
    assert all(x.grad is not None for x in ops.leaves.values())


@pytest.mark.parametrize("ignore_index", [-100, -1, 4])
def test_ignored_tokens(ignore_index, backend):
    ops = operands((3, 5), reference=True)
    ops.labels[0, :4] = ops.labels[2, 1] = ignore_index
    options = {"ignore_index": ignore_index, "top_k": 2, "candidates": torch.randint(23, (3, 5, 2))}
    compare(ops, EVERYTHING, backend=backend, **options)


@pytest.mark.parametrize("budget", BUDGETS)
def test_without_labels(budget, backend):
    ops = operands((4, 2), 7, 1031, reference=True)
    ops.labels = None
    want = tuple(name for name in EVERYTHING if name not in ("logprob", "label_logit", "rank"))
    compare(ops, want, top_k=3, memory_budget=budget, backend=backend)


@pytest.mark.parametrize("beta", [1e-3, 0.25, 0.9])
def test_jsd_weights(beta, backend):
    compare(operands(reference=True), ("jsd", "kl"), jsd_beta=beta, backend=backend)


@pytest.mark.halved
@pytest.mark.parametrize(
    "names",
    [("hidden",), ("weight",), ("bias",), ("weight", "bias"), ("hidden", "bias"), ("hidden", "weight")],
)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("bases", [("logprob",), ("logprob", "entropy"), EVERYTHING])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_whatever_is_frozen(names, budget, bases, softcap, backend):
    ops = operands((6,), 7, 1031, softcap=softcap, reference="kl" in bases).training(*names)
    ops.labels[3] = -100
    compare(ops, bases, top_k=3, candidates=torch.randint(1031, (6, 2)), memory_budget=budget, backend=backend)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", EVERYTHING)
def test_each_statistic_with_a_frozen_head(name, budget, backend):
    """Each alone, as many together are recomputed; every slice has a maximum above the one before."""
    ops = operands((6,), 7, 1031, reference=name in PAIRED).training("hidden")
    ops.bias = ops.bias + torch.linspace(0, 5, 1031, dtype=torch.float64)
    compare(ops, (name,), memory_budget=budget, backend=backend)


def test_head_without_bias(backend):
    compare(operands(bias=False, reference=True), EVERYTHING, top_k=2, backend=backend)


def test_reference_with_the_same_hidden_states(backend):
    """A policy and a reference head on one body: the gradient comes through the policy alone."""
    ops = operands(reference=True)
    ops.ref.hidden, ops.ref.weight = ops.hidden, torch.randn_like(ops.weight)
    stats = ll.token_stats(*(ops.hidden, ops.head), want=("kl",), reference=ops.reference, backend=backend)
    exact = ll.token_stats(
        *(ops.hidden, ops.head), want=("kl",), reference=(ops.hidden.detach(), ops.ref.head), backend=backend
    )
    ours, wanted = (torch.autograd.grad(s.kl.sum(), ops.hidden)[0] for s in (stats, exact))
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


def test_a_frozen_head_beside_a_reference_where_both_like_the_label_best(backend):
    """Differences are measured from the label's then, and their product with the head from another entry's."""
    ops = operands(reference=True).training("hidden")
    both = dense_logits(ops.hidden, ops.head) + dense_logits(ops.ref.hidden, ops.ref.head)
    ops.labels = both.argmax(-1)
    compare(ops, ("kl",), backend=backend)


OPTIONS = st.fixed_dictionaries(
    {
        "lead": st.sampled_from([(), (1,), (5,), (2, 3), (0,), (19,)]),
        "h": st.integers(1, 9),
        "v": st.integers(1, 300),
        "want": st.lists(st.sampled_from(EVERYTHING), min_size=1, max_size=5, unique=True),
        "padding": st.integers(0, 3),
        "bias": st.booleans(),
        "scale": st.sampled_from([1.0, 0.25, 2.0]),
        "softcap": st.sampled_from([None, 6.0]),
        "trainable": st.sets(st.sampled_from(["hidden", "weight", "bias"])),
        "budget": st.sampled_from([None, 300, 5000]),
        "top_k": st.integers(0, 4),
        "candidates": st.integers(0, 3),
        "temperature": st.sampled_from([1.0, 0.5, "per token"]),
        "ignored": st.sampled_from([0.0, 0.3, 1.0]),
        "dtype": st.sampled_from(DTYPES),
        "seed": st.integers(0, 2**16),
    }
)


@pytest.mark.slow_on("triton")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(o=OPTIONS)
def test_any_shape_and_option(o, backend):
    torch.manual_seed(o["seed"])
    ops = operands(
        *(o["lead"], o["h"], o["v"] + o["padding"]),
        dtype=o["dtype"],
        bias=o["bias"],
        reference=bool(set(PAIRED) & set(o["want"])),
        scale=o["scale"],
        softcap=o["softcap"],
        vocab_size=o["v"],
    ).training(*o["trainable"])
    ops.labels[torch.rand(o["lead"]) < o["ignored"]] = -100
    options = {
        "top_k": min(o["top_k"], o["v"]),
        "candidates": torch.randint(o["v"], (*o["lead"], o["candidates"])) if o["candidates"] else None,
        "temperature": torch.rand(o["lead"]) + 0.5 if o["temperature"] == "per token" else o["temperature"],
        "memory_budget": o["budget"],
        "backend": backend,
    }
    single = o["dtype"] == torch.float32
    want = [name for name in o["want"] if name != "rank" or not single]  # two close logits may trade places
    options["top_k"] *= not single
    compare(ops, want, tolerance=5e-5 if single else 1e-10, **options)
