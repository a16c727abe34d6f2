"""`token_loss` against the same function of the oracle's numbers: values, gradients, chunks, training loops."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import logitless as ll
from logitless.errors import GradientError, ShapeError
from logitless.vocab.reference import dense_token_stats
from tests.vocab.comparing import TOLERANCE, assert_near, assert_near_in_norm, operands

REDUCTIONS = ["mean", "sum", "none"]
CHUNK = 3 * 8 * 3 * 23  # bytes: whole rows of 23 float64 entries for some of the tokens, not for five
PPO_WANT = ("logprob", "entropy")


def ppo(s, advantages, old):
    ratio = (s.logprob - old).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -clipped - 0.01 * s.entropy


def rollout(*lead: int, dtype=torch.float64, **kwargs):
    """Operands with ignored tokens, advantages and old log-probs that require grad."""
    ops = operands(lead or (7,), dtype=dtype, **kwargs)
    ops.labels.view(-1)[2] = ops.labels.view(-1)[5] = -100
    advantages = torch.randn(ops.labels.shape, dtype=dtype, requires_grad=True)
    old = (-3 + torch.randn(ops.labels.shape, dtype=dtype)).requires_grad_()
    return ops, (advantages, old)


def call(loss_fn, ops, inputs=(), **options):
    return ll.token_loss(loss_fn, ops.hidden, ops.head, ops.labels, inputs=inputs, reference=ops.reference, **options)


def dense_loss(loss_fn, ops, inputs=(), reduction="mean", **options):
    """The loss function once, on the oracle's numbers of the tokens that count."""
    keep = ops.labels != options.get("ignore_index", -100) if ops.labels is not None else ...
    stats = dense_token_stats(ops.hidden, ops.head, ops.labels, reference=ops.reference, **options)
    loss = loss_fn(SimpleNamespace(**{name: x[keep] for name, x in stats.items()}), *(x[keep] for x in inputs))
    if reduction == "none":
        return torch.zeros(ops.hidden.shape[:-1], dtype=loss.dtype).masked_scatter(
            torch.ones(ops.hidden.shape[:-1], dtype=torch.bool) if ops.labels is None else keep, loss
        )
    return loss.sum() / (max(loss.numel(), 1) if reduction == "mean" else 1)


def leaves_of(ops, inputs):
    return [*ops.leaves.values(), *(x for x in inputs if x.requires_grad)]


def check(loss_fn, ops, inputs=(), *, tolerance=None, memory_budget=None, backend=None, **options):
    """Value and every gradient equal the oracle's, under a random upstream gradient."""
    tolerance = tolerance or TOLERANCE.get(ops.weight.dtype, 2e-5)
    exact = ops.to(torch.float64)
    exact_inputs = [x.detach().double().requires_grad_() if x.requires_grad else x for x in inputs]
    expected = dense_loss(loss_fn, exact, exact_inputs, **options)
    got = call(loss_fn, ops, tuple(inputs), memory_budget=memory_budget, backend=backend, **options)
    assert got.shape == expected.shape
    assert_near(got.detach(), expected.detach(), tolerance, "loss")
    up = torch.randn_like(expected)
    leaves = leaves_of(ops, inputs)
    found = torch.autograd.grad(got, leaves, up.to(got.dtype))
    wanted = torch.autograd.grad(expected, leaves_of(exact, exact_inputs), up)
    for i, (leaf, grad, want) in enumerate(zip(leaves, found, wanted, strict=True)):
        assert grad.dtype == leaf.dtype
        assert_near_in_norm(grad, want, 2 * tolerance, f"gradient {i}")


def grads(loss, ops, inputs=(), **kwargs):
    return torch.autograd.grad(loss, leaves_of(ops, inputs), **kwargs)


def assert_same(got, expected, tolerance=1e-12):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", [None, CHUNK])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lead", [(7,), (2, 4), (2, 1, 4)])
def test_ppo(lead, reduction, budget, dtype, backend):
    ops, inputs = rollout(*lead, dtype=dtype)
    check(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, memory_budget=budget, backend=backend)


@pytest.mark.parametrize("trainable", [("hidden",), ("weight",), ("bias",), ("weight", "bias"), ()])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_whatever_is_frozen(reduction, trainable, backend):
    ops, inputs = rollout()
    ops = ops.training(*trainable)
    check(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, memory_budget=CHUNK, backend=backend)
    fixed = tuple(x.detach() for x in inputs)
    loss = call(ppo, ops, fixed, want=PPO_WANT, reduction=reduction, backend=backend)
    assert loss.requires_grad == bool(trainable)


@pytest.mark.parametrize("budget", [None, CHUNK])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "transform", [{"softcap": 4.0}, {"scale": 1.7, "softcap": 2.5, "vocab_size": 20}, {"scale": 0.3}], ids=str
)
def test_head_transforms_and_temperature(transform, reduction, budget, backend):
    ops, inputs = rollout(**transform)
    for temperature in (0.7, torch.rand(7) + 0.5, torch.tensor(1.5)):
        options = {"temperature": temperature, "reduction": reduction, "memory_budget": budget, "backend": backend}
        check(ppo, ops, inputs, want=PPO_WANT, **options)


@pytest.mark.parametrize("budget", [None, CHUNK])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("beta", [0.5, 0.2])
def test_divergences_from_a_reference(beta, reduction, budget, backend):
    ops, (weights, _) = rollout(reference=True)

    def loss_fn(s, w):
        return w * s.jsd + s.kl.square() - 0.3 * s.reverse_kl * s.logprob

    want = ("logprob", "kl", "reverse_kl", "jsd")
    options = {"jsd_beta": beta, "reduction": reduction, "memory_budget": budget, "backend": backend}
    check(loss_fn, ops, (weights,), want=want, **options)


@pytest.mark.parametrize("budget", [None, CHUNK])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_best_entries_and_candidates(softcap, reduction, budget, backend):
    """Trailing dimensions of results, and of inputs."""
    ops, _ = rollout(2, 4, softcap=softcap)
    target = torch.rand(2, 4, 3, dtype=torch.float64, requires_grad=True)
    best = torch.rand(2, 4, 2, 2, dtype=torch.float64, requires_grad=True)

    def distil(s, target, best):
        soft = (target * (s.candidate_logits - s.logsumexp[:, None])).sum(-1)
        return (s.top_k_logits[:, None] * best).sum((1, 2)) - soft + s.rank * s.logprob

    options = {"top_k": 2, "candidates": torch.randint(23, (2, 4, 3)), "want": ("logprob", "logsumexp", "rank")}
    check(distil, ops, (target, best), reduction=reduction, memory_budget=budget, backend=backend, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_labels_every_token_counts(reduction, backend):
    ops = operands((2, 3))
    ops.labels = None
    check(lambda s: -s.entropy, ops, want=("entropy",), reduction=reduction, memory_budget=CHUNK, backend=backend)


@pytest.mark.parametrize("ignore_index", [-1, 4])
def test_another_ignore_index(ignore_index, backend):
    ops, inputs = rollout()
    ops.labels[ops.labels == -100] = ignore_index
    check(ppo, ops, inputs, want=PPO_WANT, ignore_index=ignore_index, backend=backend)


def test_reductions_agree(backend):
    ops, inputs = rollout()
    mean, total, each = (
        call(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, backend=backend) for reduction in REDUCTIONS
    )
    assert each[[2, 5]].eq(0).all()
    assert_same((mean * 5, each.sum()), (total, total))
    expected = grads(total, ops, inputs)
    assert_same(grads(mean * 5, ops, inputs), expected)
    assert_same(grads(each.sum(), ops, inputs), expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignored_tokens_give_inputs_no_gradient_even_where_the_loss_is_singular(reduction, backend):
    ops, (weights, _) = rollout()
    loss = call(lambda s, w: w / s.logprob, ops, (weights,), reduction=reduction, backend=backend)
    loss.sum().backward()
    assert weights.grad[[2, 5]].eq(0).all()
    for x in (weights, *ops.leaves.values()):
        assert x.grad.isfinite().all()


def test_the_loss_is_called_on_chunks_of_counted_tokens(backend):
    ops, inputs = rollout()

    def recording(s, advantages, old):
        seen.append((s.logprob.shape, s.entropy.shape, advantages.shape, old.shape))
        return ppo(s, advantages, old)

    results = []
    for budget, chunks in ((None, [1]), (CHUNK, [2, 3, 4]), (1, [5])):
        seen: list = []
        loss = call(recording, ops, inputs, want=PPO_WANT, memory_budget=budget, backend=backend)
        sizes = [n for ((n,), *_) in seen]
        assert seen == [((n,),) * 4 for n in sizes]
        assert sum(sizes) == 5
        assert len(sizes) in chunks
        results.append([loss.detach(), *grads(loss, ops, inputs)])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_inputs_arrive_with_their_own_tokens(backend):
    ops, _ = rollout()
    position = torch.arange(7)
    got = []
    call(lambda s, i: got.extend(i.tolist()) or -s.logprob, ops, (position,), memory_budget=CHUNK, backend=backend)
    assert got == [0, 1, 3, 4, 6]


@pytest.mark.parametrize("factor", [3.0, -0.5, 0.0, 1e-3])
def test_upstream_gradient(factor, backend):
    ops, inputs = rollout()
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    scaled = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend) * factor, ops, inputs)
    assert_same(scaled, [factor * g for g in expected])


def test_a_term_of_a_larger_loss(backend):
    ops, inputs = rollout()
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    other = sum(x.square().sum() for x in leaves_of(ops, inputs))
    both = call(ppo, ops, inputs, want=PPO_WANT, backend=backend) / 2 + other
    assert_same(
        grads(both, ops, inputs), [g / 2 + 2 * x for g, x in zip(expected, leaves_of(ops, inputs), strict=True)]
    )


def test_gradient_flows_through_an_input_that_was_computed(backend):
    ops, (weights, _) = rollout()
    slope = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    call(lambda s, w: w * s.logprob, ops, (weights.detach() * slope,), backend=backend).backward()
    logprob = ll.token_stats(ops.hidden, ops.head, ops.labels).logprob.detach()
    torch.testing.assert_close(slope.grad, (weights.detach() * logprob).sum() / 5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("first", [1.0, 0.0, 3.0])
def test_two_backwards(first, softcap, reduction, backend):
    """The first gives the gradient away, the second forms it again: never twice, never what the first scaled."""
    ops, inputs = rollout(softcap=softcap, reference=True)

    def loss_fn(s, advantages, old):
        return ppo(s, advantages, old) + s.kl * s.max_logit + s.top_k_logits.sum(-1)

    options = {"want": (*PPO_WANT, "kl", "max_logit"), "top_k": 2, "reduction": reduction, "memory_budget": CHUNK}
    expected = grads(call(loss_fn, ops, inputs, backend=backend, **options), ops, inputs)
    loss = call(loss_fn, ops, inputs, backend=backend, **options)
    loss.backward(torch.tensor(first, dtype=torch.float64), retain_graph=True)
    assert_same([x.grad for x in leaves_of(ops, inputs)], [first * g for g in expected])
    loss.backward(retain_graph=True)
    assert_same([x.grad for x in leaves_of(ops, inputs)], [(first + 1) * g for g in expected])
    loss.backward(torch.tensor(-2.0, dtype=torch.float64))
    assert_same([x.grad for x in leaves_of(ops, inputs)], [(first - 1) * g for g in expected])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_one_leaf_at_a_time(backend):
    ops, inputs = rollout()
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    loss = call(ppo, ops, inputs, want=PPO_WANT, backend=backend)
    found = [torch.autograd.grad(loss, x, retain_graph=True)[0] for x in leaves_of(ops, inputs)]
    assert_same(found, expected)


def test_micro_batches_accumulate_to_the_batch(backend):
    ops, inputs = rollout(9)
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 9)):  # the second has no token that counts
        part = (ops.hidden[rows], ops.head, ops.labels[rows])
        options = {"want": PPO_WANT, "inputs": tuple(x[rows] for x in inputs), "reduction": "sum"}
        (ll.token_loss(ppo, *part, backend=backend, **options) / 7).backward()
    assert_same([x.grad for x in leaves_of(ops, inputs)], expected)


def test_grad_scaler(backend):
    ops, inputs = rollout(dtype=torch.float32)
    expected = grads(call(ppo, ops, inputs, want=PPO_WANT, backend=backend), ops, inputs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = torch.optim.SGD(leaves_of(ops, inputs), lr=1.0)
    before = ops.weight.detach().clone()
    scaler.scale(call(ppo, ops, inputs, want=PPO_WANT, backend=backend)).backward()
    scaler.unscale_(optimizer)
    assert_same([x.grad for x in leaves_of(ops, inputs)], expected, 0.0)
    scaler.step(optimizer)
    assert_same([ops.weight.detach()], [before - expected[1]], 0.0)


@pytest.mark.parametrize("what", ["operands", "inputs"])
@pytest.mark.parametrize("repeat", [1, 2])
def test_fp16_does_not_underflow_before_the_loss_scale_arrives(repeat, what, backend):
    """Gradients under fp16's smallest number, which a loss scale lifts above it."""
    ops, (weights, _) = rollout(dtype=torch.float16)
    ops, exact = ops.training(*(("hidden", "weight", "bias") * (what == "operands"))), ops.to(torch.float64)
    weights.requires_grad_(what == "inputs")
    exact = exact.training(*ops.leaves)
    exact_weights = weights.detach().double().requires_grad_(what == "inputs")

    def tiny(s, w):
        return -w * s.logprob * 2.0**-26

    expected = grads(dense_loss(tiny, exact, (exact_weights,)), exact, (exact_weights,))
    assert all(g.half().eq(0).float().mean() > 0.5 for g in expected)
    loss = call(tiny, ops, (weights,), backend=backend)
    for _ in range(repeat):
        found = grads(loss * 2.0**24, ops, (weights,), retain_graph=True)
    for x, got, want in zip(leaves_of(ops, (weights,)), found, expected, strict=True):
        assert got.dtype == x.dtype
        assert_near_in_norm(got.double() / 2.0**24, want, 2.0**-10)


def test_half_precision_loss_is_fp32(backend):
    ops, (weights, _) = rollout(dtype=torch.bfloat16)
    loss = call(lambda s, w: -w * s.logprob, ops, (weights.detach(),), backend=backend)
    assert loss.dtype == torch.float32
    exact = ops.to(torch.float64)
    expected = dense_loss(lambda s, w: -w.double() * s.logprob, exact, (weights.detach(),))
    assert_near(loss.detach(), expected.detach(), 2e-5)
    for got, want in zip(grads(loss, ops), grads(expected, exact), strict=True):
        assert got.dtype == torch.bfloat16
        assert_near_in_norm(got, want, 2.0**-7)


CAPTURED = {
    "parameter": lambda p: p,
    "computed": lambda p: p.exp() + 1,
    "reshaped": lambda p: p.expand(1, 1)[0, 0],
}


@pytest.mark.parametrize("budget", [None, CHUNK])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("how", CAPTURED)
def test_captured_tensor_that_requires_grad(how, reduction, budget, backend):
    """Its gradient would be lost; as an input it is not."""
    ops, _ = rollout()
    captured = CAPTURED[how](nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    options = {"reduction": reduction, "memory_budget": budget, "backend": backend}
    with pytest.raises(GradientError, match=r"captured .*inputs=") as caught:
        call(lambda s: captured * s.logprob, ops, **options)
    assert "\n" not in str(caught.value)
    with torch.no_grad():
        call(lambda s: captured * s.logprob, ops, **options)
    call(lambda s: captured.detach() * s.logprob, ops, **options)
    check(lambda s, a: a * s.logprob, ops, (captured.expand(7).detach().requires_grad_(),), **options)


def test_captured_tensor_with_everything_else_frozen(backend):
    captured = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ops, _ = rollout()
    with pytest.raises(GradientError, match="captured"):
        call(lambda s: captured * s.logprob, ops.training(), backend=backend)


def test_captured_tensor_in_a_later_chunk(backend):
    ops, _ = rollout()
    captured = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    calls = []

    def from_the_second_on(s):
        calls.append(1)
        return s.logprob * (captured if len(calls) > 1 else 1)

    with pytest.raises(GradientError, match="captured"):
        call(from_the_second_on, ops, memory_budget=CHUNK, backend=backend)


def test_captured_tensor_keeps_its_gradient_without_reduction(backend):
    ops, _ = rollout()
    captured = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    each = call(lambda s: captured * s.logprob, ops, reduction="none", backend=backend)
    (grad,) = torch.autograd.grad(each.sum(), captured)
    torch.testing.assert_close(grad, each.detach().sum() / 2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda s: s.logprob.mean(), r"\(\)"),
        (lambda s: s.logprob[:, None], r"\(\d, 1\)"),
        (lambda s: s.logprob[:1], r"\(1,\)"),
        (lambda s: 3.0, "float"),
        (lambda s: None, "NoneType"),
    ],
)
def test_a_loss_that_is_not_one_number_per_token(wrong, got, reduction, backend):
    ops, _ = rollout()
    with pytest.raises(
        ShapeError, match=rf"loss_fn: expected one loss per token, shape \(\d,\), got .*{got}"
    ) as caught:
        call(wrong, ops, reduction=reduction, backend=backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lead", [(5,), (2, 0), (0,)])
def test_no_token_that_counts(lead, reduction, backend):
    ops = operands(lead)
    ops.labels.fill_(-100)
    inputs = tuple(torch.randn(lead, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = call(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, backend=backend)
    assert loss.shape == (lead if reduction == "none" else ())
    assert loss.eq(0).all()
    (loss.sum() * 3).backward()
    for x in leaves_of(ops, inputs):
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert x.grad.eq(0).all()


def test_no_token_at_all_without_labels(backend):
    ops = operands((0,))
    ops.labels = None
    loss = call(lambda s: s.entropy, ops, want=("entropy",), backend=backend)
    assert loss == 0
    assert all(g.eq(0).all() for g in grads(loss, ops))


@pytest.mark.parametrize("budget", [None, CHUNK])
def test_a_loss_of_the_inputs_alone(budget, backend):
    ops, (weights, _) = rollout()
    loss = call(lambda s, w: w.square(), ops, (weights,), memory_budget=budget, backend=backend)
    *rest, found = grads(loss, ops, (weights,))
    assert all(g.eq(0).all() for g in rest)
    counted = (ops.labels != -100).double()
    torch.testing.assert_close(found, 2 * weights.detach() * counted / 5)


@pytest.mark.parametrize("budget", [None, CHUNK])
def test_a_constant_loss_keeps_a_live_graph(budget, backend):
    ops, (weights, _) = rollout()
    options = {"memory_budget": budget, "backend": backend}
    loss = call(lambda s, w: torch.full_like(s.logprob.detach(), 2.5), ops, (weights,), **options)
    assert loss == 2.5
    assert all(g.eq(0).all() for g in grads(loss, ops, (weights,)))


def test_an_unused_statistic_gets_no_gradient(backend):
    ops, _ = rollout()
    alone = call(lambda s: -s.logprob, ops, backend=backend)
    beside = call(lambda s: -s.logprob, ops, want=("logprob", "entropy", "max_logit", "rank"), top_k=3, backend=backend)
    assert_same(grads(beside, ops), grads(alone, ops))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivatives_are_refused(reduction, backend):
    ops, inputs = rollout()
    loss = call(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, backend=backend).sum()
    with pytest.raises(GradientError, match="create_graph=True") as caught:
        grads(loss, ops, inputs, create_graph=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_gradients(reduction, backend):
    ops, inputs = rollout()
    expected = call(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, backend=backend)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = call(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, backend=backend)
        assert not got.requires_grad
        assert_same([got], [expected.detach()])


def test_operands_and_inputs_are_never_written_to(backend):
    ops, inputs = rollout()
    before = [x.detach().clone() for x in leaves_of(ops, inputs)]
    loss = call(ppo, ops, inputs, want=PPO_WANT, backend=backend)
    (loss * 2).backward()
    assert_same([x.detach() for x in leaves_of(ops, inputs)], before, 0.0)
