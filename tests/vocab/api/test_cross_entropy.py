"""`linear_cross_entropy` against torch's own cross-entropy on whole float64 logits."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.errors import DeviceError, DtypeError, GradientError, LabelError, OptionError, ShapeError
from logitless.vocab.reference import dense_logits
from tests.support.allocations import trace_allocations
from tests.support.vocab.comparing import assert_near, assert_near_in_norm, operands
from tests.support.vocab.measuring import not_interpreted

REDUCTIONS = ["mean", "sum", "none"]
BUDGETS = [None, 3 * 8 * 3 * 23, 1]  # bytes: all tokens at once, three at a time, one at a time


def problem(*lead: int, ignore_index: int = -100, **kwargs):
    ops = operands(lead or (7,), **kwargs)
    ops.labels.view(-1)[[2, 5]] = ignore_index
    return ops


def expected_loss(ops, *, reduction="mean", z_loss=0.0, denominator=None, temperature=1.0, ignore_index=-100, **kwargs):
    """Torch's cross-entropy, and a z-loss by its formula."""
    z = dense_logits(ops.hidden, ops.head, temperature).flatten(0, -2)
    labels = ops.labels.flatten()
    each = F.cross_entropy(z, labels, reduction="none", ignore_index=ignore_index, **kwargs)
    valid = labels != ignore_index
    weight = kwargs.get("weight")
    weights = valid.double() if weight is None else torch.where(valid, weight[labels.clamp_min(0)], 0.0)
    each = each + z_loss * z.logsumexp(-1).square() * weights
    if reduction == "none":
        return each.reshape(ops.labels.shape)
    if reduction == "sum":
        return each.sum()
    if denominator is None and not z_loss:
        return F.cross_entropy(z, labels, ignore_index=ignore_index, **kwargs)
    return each.sum() / (weights.sum() if denominator is None else denominator)


def call(ops, **options):
    return ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, **options)


def check(ops, *, tolerance=1e-11, memory_budget=None, backend=None, **options):
    exact = ops.to(torch.float64)
    expected = expected_loss(exact, **options)
    got = call(ops, memory_budget=memory_budget, backend=backend, **options)
    assert got.shape == expected.shape
    assert got.dtype == (torch.float64 if ops.hidden.dtype == torch.float64 else torch.float32)
    assert_near(got.detach(), expected.detach(), tolerance, "loss")
    half = ops.hidden.dtype in (torch.bfloat16, torch.float16)
    up = torch.full_like(expected, 0.5) if half else torch.randn_like(expected)  # a power of two rounds nowhere
    found = torch.autograd.grad(got, list(ops.leaves.values()), up.to(got.dtype))
    wanted = torch.autograd.grad(expected, list(exact.leaves.values()), up)
    for (name, leaf), grad, want in zip(ops.leaves.items(), found, wanted, strict=True):
        assert grad.dtype == leaf.dtype
        rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}.get(leaf.dtype, 0.0)
        assert_near_in_norm(grad, want, 2 * tolerance + rounding, f"d {name}")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_smoothing_and_z_loss(reduction, z_loss, label_smoothing, budget, backend):
    options = {"reduction": reduction, "z_loss": z_loss, "label_smoothing": label_smoothing}
    check(problem(), memory_budget=budget, backend=backend, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lead", [(6,), (2, 4), (2, 1, 4), (1, 6)])
def test_leading_dimensions(lead, reduction, backend):
    check(problem(*lead), reduction=reduction, backend=backend)
    check(
        problem(*lead, dtype=torch.float32), reduction=reduction, label_smoothing=0.1, tolerance=2e-5, backend=backend
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_token_without_leading_dimensions(reduction, backend):
    check_scalar = operands(())
    got = call(check_scalar, reduction=reduction, backend=backend)
    z = dense_logits(check_scalar.hidden, check_scalar.head)
    assert got.shape == ()
    torch.testing.assert_close(got, F.cross_entropy(z, check_scalar.labels), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [-1, 0, 22, 1000])
def test_ignore_index(ignore_index, reduction, backend):
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2}
    check(problem(ignore_index=ignore_index), backend=backend, **options)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("denominator", [12, 2.0, 0.1, torch.tensor(9), torch.tensor(7.5)], ids=repr)
def test_denominator(denominator, label_smoothing, backend):
    options = {"denominator": denominator, "label_smoothing": label_smoothing, "z_loss": 1e-2}
    check(problem(), backend=backend, **options)


def test_denominator_accumulates_micro_batches(backend):
    ops = problem(8)
    expected = torch.autograd.grad(call(ops, backend=backend), list(ops.leaves.values()))
    count = int((ops.labels != -100).sum())
    for rows in (slice(0, 3), slice(3, 8)):
        part = (ops.hidden[rows], ops.head, ops.labels[rows])
        ll.linear_cross_entropy(*part, denominator=count, backend=backend).backward()
    for x, want in zip(ops.leaves.values(), expected, strict=True):
        torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("temperature", [0.6, torch.rand(7) + 0.5, torch.tensor(2)], ids=["number", "each", "int"])
def test_temperature(temperature, reduction, backend):
    options = {"temperature": temperature, "reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2}
    check(problem(), memory_budget=BUDGETS[1], backend=backend, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("transform", [{"softcap": 3.0}, {"scale": 0.3}, {"vocab_size": 20, "softcap": 2.0}], ids=str)
def test_head_transforms(transform, reduction, backend):
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2}
    check(problem(**transform), memory_budget=BUDGETS[1], backend=backend, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("trainable", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")], ids=str)
def test_whatever_is_frozen(trainable, reduction, backend):
    check(problem().training(*trainable), reduction=reduction, label_smoothing=0.1, backend=backend)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands_give_the_exact_loss_of_those_operands(dtype, reduction, label_smoothing, backend):
    ops = problem(31, h=64, v=203, dtype=dtype)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    check(ops, tolerance=2e-5, backend=backend, **options)


@pytest.mark.not_on("triton", reason="the interpreter cuts to bf16 where a GPU rounds; on_device/ has it to that bias")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_upstream_gradient_is_not_rounded_to_bf16(label_smoothing, backend):
    """1/3 in bf16 is 0.2% too much, in every element alike: a bias, not noise."""
    ops = problem(31, h=64, v=203, dtype=torch.bfloat16)
    options = {"label_smoothing": label_smoothing, "backend": backend}
    for leaf in ops.leaves.values():
        (whole,) = torch.autograd.grad(call(ops, **options), leaf)
        (third,) = torch.autograd.grad(call(ops, **options) / 3, leaf)
        bias = (third.double() * whole.double()).sum() / whole.double().square().sum() * 3 - 1
        assert abs(bias) < 2.0**-11


def test_a_head_of_bf16_under_fp32_hidden_states(backend):
    """fp32 hidden states are not rounded to the head's dtype."""
    ops = problem(31, h=64, v=203, dtype=torch.bfloat16)
    ops.hidden = torch.randn(31, 64, requires_grad=True)
    check(ops, tolerance=2e-5, backend=backend)


def test_integer_labels_of_every_width(backend):
    ops = problem()
    expected = call(ops, backend=backend)
    for dtype in (torch.int32, torch.int16, torch.int8):
        ops.labels = ops.labels.to(dtype)
        assert torch.equal(call(ops, backend=backend), expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lead", [(4,), (0,), (3, 0)])
def test_no_token_that_counts(lead, reduction, backend):
    ops = operands(lead)
    ops.labels.fill_(-100)
    loss = call(ops, reduction=reduction, label_smoothing=0.1, z_loss=1e-2, backend=backend)
    assert loss.shape == (lead if reduction == "none" else ())
    assert loss.eq(0).all()
    for grad in torch.autograd.grad(loss.sum(), list(ops.leaves.values())):
        assert grad.eq(0).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_two_backwards(label_smoothing, backend):
    ops = problem()
    options = {"label_smoothing": label_smoothing, "z_loss": 1e-2, "backend": backend}
    expected = torch.autograd.grad(call(ops, **options), list(ops.leaves.values()))
    loss = call(ops, **options)
    (loss * 3).backward(retain_graph=True)
    (loss * 3).backward()
    for x, want in zip(ops.leaves.values(), expected, strict=True):
        torch.testing.assert_close(x.grad, 6 * want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivatives_are_refused(reduction, backend):
    ops = problem()
    loss = call(ops, reduction=reduction, backend=backend).sum()
    with pytest.raises(GradientError, match="create_graph=True"):
        torch.autograd.grad(loss, ops.hidden, create_graph=True)


@pytest.mark.parametrize("denominator", [None, 3.5])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{"softcap": 4.0}, {"dtype": torch.float32}], ids=str)
def test_class_weights(options, reduction, budget, denominator, backend):
    """Torch's meaning: a mean is over the labels' weights, unless a denominator is given."""
    ops, weight = problem(2, 4, **options), torch.rand(23, dtype=torch.float64) + 0.1
    weight[ops.labels[0, 0]] = 0.0
    more = {"denominator": denominator} if denominator and reduction == "mean" else {}
    more |= {"tolerance": 2e-5} if ops.hidden.dtype == torch.float32 else {}
    check(ops, weight=weight, reduction=reduction, memory_budget=budget, backend=backend, **more)


@pytest.mark.parametrize("extra", [{"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 1.0, "z_loss": 0.1}])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options",
    [{"vocab_size": 20}, {"dtype": torch.float32, "ranks": (2, 3)}, {"scale": 0.3, "bias": False}],
    ids=str,
)
def test_class_weights_with_smoothing_and_z_loss(options, reduction, extra, backend):
    """Torch's meaning: every class' part of the smoothing has its own weight, and the z-loss the label's."""
    ops = problem(2, 4, **options)
    weight = torch.rand(options.get("vocab_size", 23), dtype=torch.float64) + 0.1
    ops.labels.clamp_(max=weight.shape[0] - 1)
    weight[ops.labels[0, 0]] = 0.0  # of such a label the smoothing is left
    more = {"tolerance": 2e-5} if ops.hidden.dtype == torch.float32 else {}
    check(ops, weight=weight, reduction=reduction, memory_budget=BUDGETS[1], backend=backend, **extra, **more)


def test_class_weights_of_a_head_that_is_converted_by_rows(backend):
    """The smoothing's own sum of rows, each times its class' weight: 11 rows at a time."""
    ops, weight = problem(2, 4, dtype=torch.bfloat16), torch.rand(23, dtype=torch.float64)
    options = {"label_smoothing": 0.3, "memory_budget": 11 * 2 * 4 * 5, "backend": backend}
    check(ops, weight=weight, tolerance=2e-5, **options)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("trainable", [("hidden",), ("weight", "bias"), ("bias",)], ids=str)
def test_class_weights_whatever_is_frozen(trainable, label_smoothing, backend):
    weight = torch.rand(23, dtype=torch.float64)
    check(problem().training(*trainable), weight=weight, label_smoothing=label_smoothing, backend=backend)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_smoothing_by_class_behind_a_softcap_is_refused(reduction, backend):
    weight = torch.ones(23)
    check(problem(softcap=3.0), weight=weight.double(), z_loss=0.1, reduction=reduction, backend=backend)
    with pytest.raises(OptionError, match=r"weight: expected no label_smoothing .* softcap"):
        call(problem(softcap=3.0), weight=weight, label_smoothing=0.1, reduction=reduction, backend=backend)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weights_of_no_token_that_counts(reduction, backend):
    ops, weight = problem(), torch.rand(23, dtype=torch.float64)
    weight[ops.labels.clamp_min(0)] = 0.0  # nor does one whose class weighs nothing
    loss = call(ops, weight=weight, reduction=reduction, backend=backend).sum()
    assert loss == 0
    assert all(g.eq(0).all() for g in torch.autograd.grad(loss, list(ops.leaves.values())))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weights_that_torch_would_not_take(reduction, backend):
    ops, w = problem(), torch.ones(23)
    for wrong, error, said in (
        ({"weight": w[:5]}, ShapeError, r"weight: expected one number per class, shape \(23,\), got \(5,\)"),
        ({"weight": w.long()}, DtypeError, "weight: expected a floating tensor .*int64"),
        ({"weight": [1.0] * 23}, DtypeError, "weight: .*list"),
        ({"weight": w.to("meta")}, DeviceError, "weight: .*meta"),
    ):
        with pytest.raises(error, match=said) as caught:
            call(ops, reduction=reduction, backend=backend, **wrong)
        assert "\n" not in str(caught.value)
    ops.labels[1] = 23
    with pytest.raises(LabelError, match=r"labels: expected ids in 0\.\.22"):
        call(ops, reduction=reduction, backend=backend, weight=w)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_probability_targets_are_refused(reduction, backend):
    ops = problem()
    ops.labels = torch.rand(7, 23).softmax(-1)
    with pytest.raises(DtypeError, match=r"labels: expected integer ids, got torch.float32.*probability") as caught:
        call(ops, reduction=reduction, backend=backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["top_k", "want", "candidates", "reference", "jsd_beta", "size_average"])
def test_what_cross_entropy_has_no_use_for(name, backend):
    with pytest.raises(OptionError, match=f"{name!r}"):
        call(problem(), backend=backend, **{name: 1})


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": -0.1},
        {"label_smoothing": 1.1},
        {"label_smoothing": float("nan")},
        {"z_loss": 10**400},
        {"z_loss": 2**200},
        {"memory_budget": 10**400},
        {"denominator": 10**400},
        {"reduction": "average"},
        {"reduction": None},
    ],
    ids=lambda options: str(options)[:40],
)
def test_values_without_meaning(options, backend):
    (name, value), *_ = options.items()
    with pytest.raises(OptionError, match=f"{name}: expected .*, got {value!r}") as caught:
        call(problem(), backend=backend, **options)
    assert "\n" not in str(caught.value)


@not_interpreted
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_no_allocation_of_every_token_times_every_entry(label_smoothing, reduction, backend):
    ops = operands((1500,), 4, 2000, dtype=torch.float32)
    logits = 1500 * 2000 * 4

    def step():
        loss = call(ops, label_smoothing=label_smoothing, reduction=reduction, memory_budget=2**19, backend=backend)
        return torch.autograd.grad(loss.sum(), list(ops.leaves.values()))

    def dense():
        z = F.linear(ops.hidden, ops.weight, ops.bias)
        return torch.autograd.grad(F.cross_entropy(z, ops.labels), list(ops.leaves.values()))

    traced = trace_allocations(step)
    assert traced.largest <= 2**19
    assert traced.peak <= logits / 8
    assert trace_allocations(dense).largest >= logits


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_narrow_labels_in_which_ignore_index_wraps_around(reduction):
    """-100 is 156 in a byte."""
    z, w = torch.randn(3, 200, dtype=torch.float64), torch.rand(200, dtype=torch.float64)
    labels = torch.tensor([156, 1, 199], dtype=torch.uint8)
    head = ll.LMHead(torch.eye(200, dtype=torch.float64))
    found = ll.linear_cross_entropy(z, head, labels, weight=w, reduction=reduction)
    torch.testing.assert_close(found, F.cross_entropy(z, labels.long(), w, reduction=reduction))
