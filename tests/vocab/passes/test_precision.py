"""How right the numbers are where other implementations are wrong: bf16, wide margins, near-equal policies."""

import statistics

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.vocab.reference import dense_cross_entropy, dense_token_stats
from tests.support.vocab.comparing import Operands, assert_near, assert_near_in_norm, operands

BUDGETS = [None, 400_000]


def stats_of(ops, want, backend, budget=None):
    return ll.token_stats(
        *(ops.hidden, ops.head, ops.labels),
        want=want,
        reference=ops.reference,
        backend=backend,
        memory_budget=budget,
    )


def exactly(ops, want):
    exact = ops.to(torch.float64)
    return exact, dense_token_stats(*(exact.hidden, exact.head, ops.labels), want=want, reference=exact.reference)


def margin_rows(margin: float, n: int = 6, h: int = 8, v: int = 300) -> Operands:
    """Rows whose label stands `margin` nats above random others; labels spread over the vocabulary."""
    ops = operands((n,), h, v, dtype=torch.float32, spread=1.0)
    ops.labels[:] = torch.linspace(0, v - 1, n).long()
    with torch.no_grad():
        ops.weight[:, :n] = 0
        ops.hidden[:, :n] = torch.eye(n)
        others = (ops.hidden @ ops.weight.T + ops.bias).logsumexp(-1)
        ops.weight[ops.labels, torch.arange(n)] = others + margin - ops.bias[ops.labels]
        ops.weight[ops.labels, n:] = 0
    return ops


@pytest.mark.parametrize("budget", BUDGETS)
def test_bf16_operands_give_the_exact_numbers_of_bf16_operands(budget, backend):
    ops = operands((40,), 256, 2048, dtype=torch.bfloat16, reference=True)
    want = ("logprob", "entropy", "logsumexp", "self_certainty", "kl")
    got = stats_of(ops, want, backend, budget)
    exact, expected = exactly(ops, want)
    for name in want:
        assert getattr(got, name).dtype == torch.float32
        assert_near(getattr(got, name).detach(), expected[name].detach(), 1e-5, name)
    up = torch.randn(40)
    ours = torch.autograd.grad(got.logprob, list(ops.leaves.values()), up)
    wanted = torch.autograd.grad(expected["logprob"], list(exact.leaves.values()), up.double())
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        assert_near_in_norm(a, b, 2**-8)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
@pytest.mark.parametrize("margin", [10.0, 20.0, 40.0, 60.0])
def test_no_cliff_at_wide_margins(margin, trainable, budget, backend):
    """fp32 cross-entropy is exactly 0 past 16.6 nats; here value and gradient keep their relative accuracy."""
    ops = margin_rows(margin).training(*trainable)
    got = stats_of(ops, ("logprob",), backend, budget).logprob
    exact, expected = exactly(ops, ("logprob",))
    expected = expected["logprob"]
    assert expected.max() < 0
    torch.testing.assert_close(got.double(), expected, rtol=3e-7 * margin, atol=0)
    for row in range(len(expected)):
        ours = torch.autograd.grad(got[row], list(ops.leaves.values()), retain_graph=True)
        wanted = torch.autograd.grad(expected[row], list(exact.leaves.values()), retain_graph=True)
        for a, b in zip(ours, wanted, strict=True):
            assert_near_in_norm(a, b, 1e-3)


@pytest.mark.parametrize("margin", [20.0, 60.0])
def test_no_cliff_in_the_losses(margin, backend):
    ops = margin_rows(margin)
    exact = ops.to(torch.float64)
    expected = dense_cross_entropy(exact.hidden, exact.head, ops.labels)
    wanted = torch.autograd.grad(expected, list(exact.leaves.values()))
    for loss in (
        ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend=backend),
        ll.token_loss(lambda s: -s.logprob, ops.hidden, ops.head, ops.labels, backend=backend),
    ):
        torch.testing.assert_close(loss.double(), expected, rtol=3e-7 * margin, atol=0)
        for a, b in zip(torch.autograd.grad(loss, list(ops.leaves.values())), wanted, strict=True):
            assert_near_in_norm(a, b, 1e-3)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
@pytest.mark.parametrize("margin", [5.0, 20.0, 40.0])
def test_entropy_of_peaked_rows(margin, trainable, budget, backend):
    ops = margin_rows(margin).training(*trainable)
    ops.labels = ops.labels.roll(1)  # the peak is not the label
    got = stats_of(ops, ("entropy",), backend, budget).entropy
    exact, expected = exactly(ops, ("entropy",))
    expected = expected["entropy"]
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=0)
    for row in range(len(expected)):
        ours = torch.autograd.grad(got[row], list(ops.leaves.values()), retain_graph=True)
        wanted = torch.autograd.grad(expected[row], list(exact.leaves.values()), retain_graph=True)
        for a, b in zip(ours, wanted, strict=True):
            assert_near_in_norm(a, b, 2e-3)


def near_policy(distance: float, shift: float = 0.0, n: int = 24, v: int = 5000) -> Operands:
    """A policy whose log-odds differ from its reference's by about `distance`, its logits by `shift` besides.

    On a grid where fp32 products and sums are exact, so that what is measured is the fold, not the logits."""
    ops = operands((n,), 32, v, dtype=torch.float32)
    with torch.no_grad():
        for x, step in ((ops.hidden, 2.0**-3), (ops.weight, 2.0**-14), (ops.bias, 2.0**-14)):
            x.copy_((x / step).round() * step)
        ops.ref = Operands(ops.hidden.clone(), ops.weight.clone(), ops.bias.clone(), None)
        ops.weight += (distance * 2**14 * torch.randn_like(ops.weight) / 32**0.5).round() * 2.0**-14
        ops.bias += shift
    return ops


@pytest.mark.halved
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight", "bias")])
@pytest.mark.parametrize("shift", [0.0, 7.0, -40.0])
@pytest.mark.parametrize("distance", [5e-4, 3e-3, 0.03, 0.3, 3.0])
def test_kl_of_a_policy_near_its_reference(distance, shift, trainable, budget, backend):
    ops = near_policy(distance, shift).training(*trainable)
    got = stats_of(ops, ("kl",), backend, budget).kl
    exact, expected = exactly(ops, ("kl",))
    expected = expected["kl"]
    assert (got >= 0).all()
    sizeable = expected > 1e-7
    assert sizeable.float().mean() > 0.5
    torch.testing.assert_close(got.double()[sizeable], expected[sizeable], rtol=1e-3 if shift == 0 else 2e-3, atol=0)
    up = torch.rand(len(expected))
    ours = torch.autograd.grad(got, list(ops.leaves.values()), up)
    wanted = torch.autograd.grad(expected, list(exact.leaves.values()), up.double())
    for a, b in zip(ours, wanted, strict=True):
        assert_near_in_norm(a, b, 2e-3)


@pytest.mark.halved
@pytest.mark.parametrize("label", ["the sure one", "another", None])
@pytest.mark.parametrize("sure", [0, 2500, 4999])
@pytest.mark.parametrize("margin", [12.0, 18.0, 24.0])
def test_kl_of_a_sure_policy(margin, sure, label, backend):
    """One entry holds nearly all mass, wherever it lies: d0 is its own gap, so that KL keeps its digits near 0."""
    ops = near_policy(0.3, shift=7.0).training("hidden")
    with torch.no_grad():
        for bias in (ops.bias, ops.ref.bias):
            bias[sure] += round(margin + 9)
    ops.labels[:] = sure if label == "the sure one" else 77
    exact = ops.to(torch.float64)
    labels = None if label is None else ops.labels
    options = {"want": ("kl", "reverse_kl")}
    got = ll.token_stats(
        *(ops.hidden, ops.head, labels), **options, reference=ops.reference, backend=backend, memory_budget=150_000
    )
    expected = dense_token_stats(*(exact.hidden, exact.head, labels), **options, reference=exact.reference)
    assert expected["kl"].median() < 1e-3
    for name, value in expected.items():
        torch.testing.assert_close(getattr(got, name).double(), value.detach(), rtol=1e-4, atol=1e-14)


@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("seed", range(3))
def test_kl_of_heads_far_apart_in_many_slices(seed, backend):
    """d0 moves by many nats from slice to slice: sums that were nearly -Σw must not grow with it."""
    torch.manual_seed(seed)
    ops = operands((96,), 48, 2048, dtype=torch.float32, spread=8.0, reference=True)
    with torch.no_grad():
        got = stats_of(ops, ("kl", "reverse_kl"), backend, 30_000)
        _, expected = exactly(ops, ("kl", "reverse_kl"))
    for name, value in expected.items():
        torch.testing.assert_close(getattr(got, name).double(), value, rtol=2e-6, atol=3e-5)


@pytest.mark.parametrize("budget", [None, 100_000])
def test_kl_of_a_policy_equal_to_its_reference(budget, backend):
    ops = near_policy(0.0, n=6)
    want = ("kl", "reverse_kl", "jsd", "kl_mixture", "reverse_kl_mixture")
    got = stats_of(ops, want, backend, budget)
    for name in want:
        value = getattr(got, name)
        assert (value >= 0).all(), name
        assert (value <= 1e-9).all(), name
        for grad in torch.autograd.grad(value.sum(), list(ops.leaves.values()), retain_graph=True):
            assert grad.abs().max() <= 1e-5, name


@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("distance", [3e-3, 0.03, 0.3, 3.0])
def test_other_divergences_are_never_negative(distance, backend):
    ops = near_policy(distance)
    want = ("reverse_kl", "jsd", "kl_mixture", "reverse_kl_mixture")
    got = stats_of(ops, want, backend, 20_000)
    _, expected = exactly(ops, want)
    for name, value in expected.items():
        assert (getattr(got, name) >= 0).all(), name
        torch.testing.assert_close(getattr(got, name).double(), value, rtol=1e-3, atol=0)


WANT = ("logprob", "logsumexp", "entropy", "self_certainty", "sum_sq_prob", "max_logit", "kl", "reverse_kl", "jsd")


LUCK = 1.5  # where both see only the rounding of the logits, in sums of another order


def rms(x: torch.Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def plain(ops: Operands) -> dict[str, torch.Tensor]:
    """The statistics as one writes them with torch's own functions in the operands' dtype."""
    z, z_ref = (F.linear(o.hidden, o.weight, o.bias) for o in (ops, ops.ref))
    logp, logq = z.log_softmax(-1), z_ref.detach().log_softmax(-1)
    log_m = torch.logaddexp(logp, logq) - torch.tensor(2.0).log()

    def divergence(a, b):
        return F.kl_div(b, a, reduction="none", log_target=True).sum(-1)

    return {
        "logprob": logp.gather(-1, ops.labels[:, None])[:, 0],
        "logsumexp": z.logsumexp(-1),
        "entropy": -(logp.exp() * logp).sum(-1),
        "self_certainty": z.logsumexp(-1) - z.mean(-1) - torch.tensor(float(z.shape[-1])).log(),
        "sum_sq_prob": logp.exp().square().sum(-1),
        "max_logit": z.amax(-1),
        "kl": divergence(logp, logq),
        "reverse_kl": divergence(logq, logp),
        "jsd": 0.5 * divergence(logp, log_m) + 0.5 * divergence(logq, log_m),
    }


def results(numbers, ops: Operands, name: str, up: torch.Tensor) -> list[torch.Tensor]:
    """A statistic and its gradients in float64."""
    value = numbers[name] if isinstance(numbers, dict) else getattr(numbers, name)
    grads = torch.autograd.grad(value, list(ops.leaves.values()), up.to(value.dtype), retain_graph=True)
    return [x.detach().double() for x in (value, *grads)]


def error_ratios(dtype, spread, budget, backend) -> dict[str, list[float]]:
    """For each statistic and each of its gradients: our error over plain torch's, which has a small floor."""
    ops = operands((24,), 48, 3000, dtype=dtype, spread=spread, reference=True)
    got, rough = stats_of(ops, WANT, backend, budget), plain(ops)
    exact, expected = exactly(ops, WANT)
    up = torch.randn(24)
    unit = 5e-7 if dtype == torch.float32 else 2**-9
    terms = [rms(up) * rms(x) for x in (ops.weight, ops.hidden, torch.ones(1))]
    out = {}
    for name in WANT:
        triples = zip(results(got, ops, name, up), results(rough, ops, name, up), strict=True)
        truth = results(expected, exact, name, up)
        floors = [1e-6 * (1 + rms(truth[0])), *(unit * max(rms(x), t) for x, t in zip(truth[1:], terms, strict=True))]
        out[name] = [rms(a - x) / (rms(b - x) + floor) for (a, b), x, floor in zip(triples, truth, floors, strict=True)]
    return out


@pytest.mark.halved
@pytest.mark.not_on("triton", reason="five draws of every statistic take minutes under the interpreter")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_further_from_exact_than_plain_torch(dtype, spread, budget, backend):
    draws = [error_ratios(dtype, spread, budget, backend) for _ in range(5)]
    for name in WANT:
        for i, what in enumerate(("value", "d hidden", "d weight", "d bias")):
            assert statistics.median(ratios[name][i] for ratios in draws) <= LUCK, f"{name}: {what}"


@pytest.mark.not_on("triton", reason="1,000 tokens in many slices take minutes under the interpreter")
@pytest.mark.parametrize("trainable", [("hidden", "weight", "bias"), ("weight",)])
@pytest.mark.parametrize("loss", ["token_stats", "token_loss", "linear_cross_entropy"])
def test_weight_gradient_accumulates_in_fp32(loss, trainable, backend):
    """A thousand tokens through dozens of slices into a bf16 head: one rounding, at the end."""
    ops = operands((1000,), 16, 64, dtype=torch.bfloat16, spread=1.0, bias=False).training(*trainable)
    ops.labels %= 7
    call = (ops.hidden, ops.head, ops.labels)
    options = {"memory_budget": 4000, "backend": backend}
    if loss == "token_stats":
        value = -ll.token_stats(*call, **options).logprob.sum()
    elif loss == "token_loss":
        value = ll.token_loss(lambda s: -s.logprob, *call, reduction="sum", **options)
    else:
        value = ll.linear_cross_entropy(*call, reduction="sum", **options)
    (got,) = torch.autograd.grad(value, ops.weight)
    exact = ops.to(torch.float64)
    (wanted,) = torch.autograd.grad(
        dense_cross_entropy(exact.hidden, exact.head, ops.labels, reduction="sum"), exact.weight
    )
    slack = 2**-8 * wanted.abs() + 1e-5 * wanted.abs().max()
    assert ((got.double() - wanted).abs() <= slack).all()


@pytest.mark.not_on("triton", reason="its interpreter truncates to bf16, where a GPU rounds")
@pytest.mark.parametrize(("factor", "most"), [(1.0, 2e-3), (1 / 3, 3e-3), (0.997, 3e-3)])
def test_a_bf16_loss_that_is_weighted_rounds_its_hidden_gradient_twice(factor, most, backend):
    ops = operands((512,), 64, 1024, dtype=torch.bfloat16, bias=False).training("hidden")
    (ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend=backend) * factor).backward()
    exact = ops.to(torch.float64)
    (dense_cross_entropy(exact.hidden, exact.head, ops.labels) * factor).backward()
    off = ops.hidden.grad.double() - exact.hidden.grad
    assert off.norm() <= most * exact.hidden.grad.norm()


@pytest.mark.not_on("triton", reason="65,536 entries take minutes under the interpreter")
@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("budget", [None, 200_000])
def test_a_few_rows_of_a_long_vocabulary(rows, budget, backend):
    """MKL adds up a few rows one product after another, each rounded at the size of the sum so far."""
    ops = operands((rows,), 64, 65_536, dtype=torch.float32, bias=False).training("hidden")
    with torch.no_grad():
        ops.weight.mul_(0.05).add_(1.0)
    exact = ops.to(torch.float64)
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend=backend, memory_budget=budget)
    (got,) = torch.autograd.grad(loss, ops.hidden)
    (wanted,) = torch.autograd.grad(dense_cross_entropy(exact.hidden, exact.head, ops.labels), exact.hidden)
    assert float((got.double() - wanted).abs().max()) < 3e-6 / rows


def test_self_certainty_of_nearly_equal_logits_is_not_negative(backend):
    """Which rounding alone would make it for a third of the tokens."""
    hidden, head = torch.randn(64, 32), ll.LMHead(1e-4 * torch.randn(2_000, 32))
    got = ll.token_stats(hidden, head, want=("self_certainty",), backend=backend).self_certainty
    exact = dense_token_stats(hidden.double(), ll.LMHead(head.weight.double()), want=("self_certainty",))
    assert (got >= 0).all()
    assert_near(got.double(), exact["self_certainty"], 3e-6)
