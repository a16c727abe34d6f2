"""`token_loss` against the same function of the oracle's numbers: values, gradients, chunks."""

import pytest
import torch

from tests.support.vocab.comparing import operands
from tests.support.vocab.token_losses import (
    CHUNK,
    PPO_WANT,
    REDUCTIONS,
    assert_same,
    call,
    check,
    grads,
    ppo,
    rollout,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", [None, CHUNK])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lead", [(7,), (2, 4), (2, 1, 4)])
def test_ppo(lead, reduction, budget, dtype, backend):
    ops, inputs = rollout(*lead, dtype=dtype)
    check(ppo, ops, inputs, want=PPO_WANT, reduction=reduction, memory_budget=budget, backend=backend)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_loss_runs_with_autocast_off(reduction, backend):
    ops, seen = operands((7,), dtype=torch.float32), []

    def loss_fn(stats):
        seen.append((torch.is_autocast_enabled("cpu"), (stats.logprob[:, None] @ stats.logprob[None]).dtype))
        return -stats.logprob

    with torch.autocast("cpu", torch.bfloat16):
        call(loss_fn, ops, (), reduction=reduction, backend=backend)
    assert set(seen) == {(False, torch.float32)}


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
    some = {"triton": CHUNK // 2}.get(backend, CHUNK)  # bytes of two or three tokens
    for budget, chunks in ((None, [1]), (some, [2, 3, 4]), (1, [5])):
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
