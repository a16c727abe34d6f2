"""torch's own operator database: every sample of its cross-entropies, log-softmaxes, log-sum-exps and KL divergences.

`torch.testing._internal` needs `expecttest`, so the samples are there under `make test-peers` alone.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import logitless as ll
from tests.support.peers.outcomes import BUDGET, Within, assert_held, outcome

LINEAR = "nn.functional.linear_cross_entropy"
OPERATORS = (
    (LINEAR, ""),
    (LINEAR, "chunked"),
    (LINEAR, "chunked_none"),
    ("nn.functional.cross_entropy", ""),
    ("nn.functional.nll_loss", ""),
    ("log_softmax", ""),
    ("log_softmax", "with_dtype"),
    ("softmax", ""),
    ("logsumexp", ""),
    ("nn.functional.kl_div", ""),
)
# How many samples each has in this torch where gradients are wanted; the tests below fail where it has others.
COUNTED = "2.13"
SAMPLES = {
    (LINEAR, ""): 119,
    (LINEAR, "chunked"): 133,
    (LINEAR, "chunked_none"): 77,
    ("nn.functional.cross_entropy", ""): 21,
    ("nn.functional.nll_loss", ""): 61,
    ("log_softmax", ""): 7,
    ("log_softmax", "with_dtype"): 7,
    ("softmax", ""): 7,
    ("logsumexp", ""): 15,
    ("nn.functional.kl_div", ""): 16,
}
# Of bf16 it has others: accumulation in other dtypes, and fewer edges.
SAMPLES_OF_BF16 = {(LINEAR, "chunked"): 161, (LINEAR, "chunked_none"): 91, ("logsumexp", ""): 5}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
needs_samples = pytest.mark.calls_peer("expecttest")


@cache
def operators() -> dict[tuple[str, str], Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {(x.name, x.variant_test_name): x for x in op_db if (x.name, x.variant_test_name) in OPERATORS}


@cache
def samples(operator: tuple[str, str], dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    found = operators().get(operator)
    return [] if found is None else list(found.sample_inputs("cpu", dtype, requires_grad=True))


def sample(operator: tuple[str, str], dtype: torch.dtype, index: int) -> Any:
    found, counted = samples(operator, dtype), count_of(operator, dtype)
    if len(found) != counted and not torch.__version__.startswith(f"{COUNTED}."):
        pytest.skip(f"torch {torch.__version__} has {len(found)} such samples, not the {counted} of torch {COUNTED}")
    assert len(found) == counted
    return found[index]


def count_of(operator: tuple[str, str], dtype: torch.dtype) -> int:
    return (SAMPLES_OF_BF16 if dtype == torch.bfloat16 else {}).get(operator, SAMPLES[operator])


def cases(*names: str) -> list[Any]:
    return [
        pytest.param(operator, dtype, index, id=f"{operator[0]}-{operator[1]}-{dtype}-{index}")
        for operator in SAMPLES
        for dtype in DTYPES
        for index in range(count_of(operator, dtype))
        if operator[0] in names
    ]


def reduced(each: Tensor, weights: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    return each.sum() / (weights.sum() if reduction == "mean" else 1)


def one_head(
    hidden: Tensor,  # (N, H)
    head: ll.LMHead,
    target: Tensor,  # (N,) ids or (N, C) probabilities
    weight: Tensor | None = None,  # (C,)
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`cross_entropy` behind a head, with probability targets from the statistics of every class."""
    ignore = -100 if ignore_index is None else ignore_index
    if not target.is_floating_point():
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing}
        return ll.linear_cross_entropy(hidden, head, target, weight=weight, ignore_index=ignore, **options)
    classes = torch.arange(target.shape[-1]).expand(target.shape)
    stats = ll.token_stats(hidden, head, candidates=classes, want=("logsumexp",))
    logp = stats.candidate_logits - stats.logsumexp[..., None]
    spread = target.to(logp.dtype) * (1 - label_smoothing) + label_smoothing / target.shape[-1]
    spread = spread if weight is None else spread * weight
    each = -(spread * logp).sum(-1)
    return reduced(each, torch.ones_like(each), reduction)


def linear_ours(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Any = None, **options: Any
) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy` on ours: a head for each place of a loss of more dimensions."""
    options.pop("options", None)
    if linear_weight.ndim == 2:
        rows = input[None] if input.ndim == 1 else input
        flat = target[None] if input.ndim == 1 else target
        loss = one_head(rows, ll.LMHead(linear_weight, linear_bias), flat, **options)
        return loss[0] if input.ndim == 1 and loss.ndim else loss
    reduction, weight = options.pop("reduction", "mean"), options.get("weight")
    heads = linear_weight.flatten(1, -2).unbind(1)
    count, places = len(heads), linear_weight.shape[1:-1]
    biases = [None] * count if linear_bias is None else linear_bias.flatten(1).unbind(1)
    soft = target.is_floating_point()
    targets = target.flatten(2).unbind(2) if soft else target.flatten(1).unbind(1)
    each = torch.stack(
        [
            one_head(input, ll.LMHead(w, b), t, reduction="none", **options)
            for w, b, t in zip(heads, biases, targets, strict=True)
        ],
        dim=1,
    ).unflatten(1, places)
    if soft:
        counted = torch.ones_like(each)
    else:
        ignore = options.get("ignore_index")
        kept = target != (-100 if ignore is None else ignore)
        counted = kept.to(each.dtype)
        if weight is not None:
            counted = torch.where(kept, weight[target.clamp(0, weight.shape[0] - 1)], 0).to(each.dtype)
    return reduced(each, counted, reduction)


def finite_mean(function: Any) -> Any:
    """torch's mean over no token, NaN, as the 0 that ours is."""

    def with_zero(**operands: Any) -> Tensor:
        loss = function(**operands)
        return torch.where(loss.isnan(), 0 * loss.detach().nan_to_num(), loss) if loss.ndim == 0 else loss

    return with_zero


def check(ours: Any, theirs: Any, operands: dict[str, Any], trained: tuple[str, ...], dtype: torch.dtype) -> None:
    """Ours against torch's in float64, on the numbers of the sample's dtype."""
    exact = outcome(theirs, operands, trained, torch.float64)
    nothing = any(x.isnan().any() for x in exact.values())  # a mean over no token
    found = outcome(ours, operands, trained)
    if nothing:
        assert all(not x.any() for x in found.values())
        return
    assert_held(found, exact, Within(1e-1, 1e-1), BUDGET[dtype] * (1 if dtype == torch.float64 else 2))


def linear_operands(given: Any) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """The sample's tensors by name, its other options, and which tensors are trained."""
    linear_weight, target = given.args
    tensors = {"input": given.input, "linear_weight": linear_weight, "target": target}
    tensors |= {name: x for name, x in given.kwargs.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in given.kwargs.items() if not isinstance(x, Tensor) and name != "options"}
    trained = tuple(name for name in ("input", "linear_weight", "linear_bias") if name in tensors)
    return tensors, others, trained


@needs_samples
@pytest.mark.parametrize(("operator", "dtype", "index"), cases(LINEAR))
def test_linear_cross_entropy(operator, dtype, index):
    operands, others, trained = linear_operands(sample(operator, dtype, index))
    check(
        lambda **x: linear_ours(**x, **others),
        lambda **x: functional.linear_cross_entropy(**x, **others),
        *(operands, trained, dtype),
    )


def differentiable(operator: tuple[str, str], index: int) -> tuple[Any, tuple[Tensor, ...]]:
    operands, others, trained = linear_operands(sample(operator, torch.float64, index))
    leaves = tuple(operands[name].detach().clone().requires_grad_() for name in trained)

    def function(*given: Tensor) -> Tensor:
        return linear_ours(**{**operands, **dict(zip(trained, given, strict=True))}, **others)

    return function, leaves


CHECKED = [pytest.param(operator, index) for operator in OPERATORS[:3] for index in range(SAMPLES[operator])]


@needs_samples
@pytest.mark.parametrize(("operator", "index"), CHECKED)
def test_gradcheck(operator, index):
    """With its defaults: fast mode off, an eps of 1e-6, and no difference between two backwards."""
    function, leaves = differentiable(operator, index)
    if not any(x.numel() for x in leaves) or not function(*leaves).numel():
        return
    assert torch.autograd.gradcheck(function, leaves)


def by_rows(logits: Tensor, axis: int) -> tuple[Tensor, ll.LMHead]:
    """Logits along an axis as hidden states, behind the head that leaves them as they are."""
    rows = logits.movedim(axis, -1) if logits.ndim else logits[None]
    return rows, ll.LMHead(torch.eye(rows.shape[-1], dtype=rows.dtype))


def class_axis(logits: Tensor) -> int:
    return 0 if logits.ndim == 1 else 1


@needs_samples
@pytest.mark.parametrize(("operator", "dtype", "index"), cases("nn.functional.cross_entropy"))
def test_cross_entropy(operator, dtype, index):
    given = sample(operator, dtype, index)
    options, axis = dict(given.kwargs), class_axis(given.input)
    (target,) = given.args

    def ours(input: Tensor) -> Tensor:
        rows, head = by_rows(input, axis)
        ids = target.movedim(axis, -1) if target.is_floating_point() else target
        return one_head(rows, head, ids, **options)

    def theirs(input: Tensor) -> Tensor:
        exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
        return functional.cross_entropy(input, target.double() if target.is_floating_point() else target, **exact)

    check(ours, theirs, {"input": given.input}, ("input",), dtype)


@needs_samples
@pytest.mark.parametrize(("operator", "dtype", "index"), cases("nn.functional.nll_loss"))
def test_nll_loss(operator, dtype, index):
    """Of log-probs, which are the log-softmax of themselves: compared on those of the sample's input."""
    given = sample(operator, dtype, index)
    options, axis = dict(given.kwargs), class_axis(given.input)
    (target,) = given.args

    def ours(input: Tensor) -> Tensor:
        return one_head(*by_rows(input, axis), target, **options)

    def theirs(input: Tensor) -> Tensor:
        exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
        return functional.nll_loss(input.log_softmax(axis), target, **exact)

    check(ours, theirs, {"input": given.input}, ("input",), dtype)


@needs_samples
@pytest.mark.parametrize(("operator", "dtype", "index"), cases("log_softmax", "softmax"))
def test_log_softmax(operator, dtype, index):
    """Every entry, as candidates."""
    given = sample(operator, dtype, index)
    axis = given.args[0]
    if given.input.ndim and not given.input.shape[axis]:
        pytest.skip("a softmax over no entry has no head")

    def ours(input: Tensor) -> Tensor:
        rows, head = by_rows(input, axis)
        classes = torch.arange(rows.shape[-1]).expand(rows.shape)
        stats = ll.token_stats(rows, head, candidates=classes, want=("logsumexp",))
        logp = stats.candidate_logits - stats.logsumexp[..., None]
        logp = logp if operator[0] == "log_softmax" else logp.exp()
        return logp.movedim(-1, axis) if input.ndim else logp[0]

    def theirs(input: Tensor) -> Tensor:
        return getattr(input, operator[0])(axis)

    check(ours, theirs, {"input": given.input}, ("input",), dtype)


@needs_samples
@pytest.mark.parametrize(("operator", "dtype", "index"), cases("logsumexp"))
def test_logsumexp(operator, dtype, index):
    """Over one axis or several, which are one after the others are moved away."""
    given = sample(operator, dtype, index)
    if not given.input.numel():
        pytest.skip("a sum over no entry has no head")
    axes, keep = given.args[0], given.args[1] if len(given.args) > 1 else given.kwargs.get("keepdim", False)
    axes = (axes,) if isinstance(axes, int) else tuple(axes)

    def ours(input: Tensor) -> Tensor:
        x = input[None] if input.ndim == 0 else input
        places = sorted(axis % x.ndim for axis in axes) if axes else list(range(x.ndim))
        rest = [i for i in range(x.ndim) if i not in places]
        rows = x.permute(*rest, *places).flatten(len(rest))
        found = ll.token_stats(
            rows, ll.LMHead(torch.eye(rows.shape[-1], dtype=rows.dtype)), want=("logsumexp",)
        ).logsumexp
        if keep and input.ndim:
            for place in places:
                found = found.unsqueeze(place)
        return found.reshape(theirs(input).shape)

    def theirs(input: Tensor) -> Tensor:
        return torch.logsumexp(input, *given.args, **given.kwargs)

    check(ours, theirs, {"input": given.input}, ("input",), dtype)


@needs_samples
@pytest.mark.parametrize(("operator", "dtype", "index"), cases("nn.functional.kl_div"))
def test_kl_div(operator, dtype, index):
    """Of the distributions that the sample's input and target are the logits of, summed over the last axis."""
    given = sample(operator, dtype, index)
    if given.input.ndim == 0 or given.kwargs.get("reduction") == "none":
        pytest.skip("a divergence per entry, or of no axis, is no statistic of a token")
    (target,) = given.args
    reduction = given.kwargs.get("reduction", "mean")

    def divided(total: Tensor) -> Tensor:
        return total / {"sum": 1, "batchmean": given.input.shape[0], "mean": given.input.numel()}[reduction]

    def ours(input: Tensor) -> Tensor:
        rows, head = by_rows(input, -1)
        reference = target.detach().expand_as(rows), head
        return divided(ll.token_stats(rows, head, want=("reverse_kl",), reference=reference).reverse_kl.sum())

    def theirs(input: Tensor) -> Tensor:
        t = target.detach().double().expand_as(input).log_softmax(-1)
        return functional.kl_div(input.log_softmax(-1), t, reduction=reduction, log_target=True)

    check(ours, theirs, {"input": given.input}, ("input",), dtype)
