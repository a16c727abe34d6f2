"""`logitless.jax.token_stats` and `linear_topk` against the dense oracle and torch's own pass."""

import math
from functools import partial

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

import logitless as ll  # noqa: E402
from logitless.algebra.rules import COLDEST  # noqa: E402
from logitless.jax import LMHead, linear_cross_entropy, linear_topk, sample_tokens, token_stats  # noqa: E402
from logitless.vocab.reference import dense_token_stats  # noqa: E402
from tests.support.jax.comparing import array, compare, head_of, near, near_in_norm  # noqa: E402
from tests.support.vocab.comparing import ALONE, EVERYTHING, FIXED, TAIL, operands  # noqa: E402

SMALL = 2000  # bytes: several chunks of tokens and several slices, both ragged


def test_everything_against_the_oracle():
    ops = operands((2, 5), v=23, reference=True, scale=0.7, softcap=4.0)
    ops.labels[0, 1] = ops.labels[1, 3] = -100
    options = {"top_k": 3, "candidates": torch.randint(23, (2, 5, 2)), "jsd_beta": 0.3}
    want = (*EVERYTHING, *FIXED, *TAIL)
    expected = dense_token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, **options)
    with jax.enable_x64(True):
        compare(ops, expected, 1e-10, memory_budget=4 * SMALL, **options)


def test_streaming_against_the_oracle():
    """Slices of slices, no second look: prime sizes, padded rows that hold NaN, one temperature per token."""
    ops = operands((11,), v=31, reference=True, vocab_size=29)
    with torch.no_grad():
        for x in (ops, ops.ref):
            x.weight[29:], x.bias[29:] = math.nan, math.nan
    ops.labels[4] = -100
    want = tuple(name for name in EVERYTHING if name != "jsd")
    temperature = torch.rand(11, dtype=torch.float64) + 0.5
    expected = dense_token_stats(
        ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, temperature=temperature
    )
    with jax.enable_x64(True):
        compare(ops, expected, 1e-10, memory_budget=SMALL, temperature=temperature)


@pytest.mark.parametrize(("n", "v"), [(1, 1), (1, 2), (5, 3)])
def test_tiny_vocabularies(n, v):
    ops = operands((n,), v=v, bias=False, reference=True)
    want = ("logprob", "logsumexp", "entropy", "rank", "max_logit", "kl", "jsd")
    expected = dense_token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, top_k=v)
    with jax.enable_x64(True):
        compare(ops, expected, 1e-10, top_k=v)


def test_logits_of_any_size():
    """Rows with logits of ±1e4, and entries that a bias of -inf forbids, a label among them."""
    ops = operands((6,), v=19, spread=3000.0)
    ops.labels[:] = torch.tensor([0, 2, 5, 7, 11, 18])
    with torch.no_grad():
        ops.bias[[2, 9]] = -math.inf
    want = ("logprob", "logsumexp", "entropy", "rank", "sum_sq_prob")
    expected = dense_token_stats(ops.hidden, ops.head, ops.labels, want=want)
    with jax.enable_x64(True):
        compare(ops, expected, 1e-10, memory_budget=SMALL)


def test_slices_without_a_possible_entry():
    """What both heads forbid is as if it were not there, whole slices of it, too."""
    ops = operands((6,), v=19, reference=True)
    ops.labels[:] = torch.arange(9, 15)
    want = ("logprob", "logsumexp", "entropy", "rank", "sum_sq_prob", "kl", "reverse_kl", "jsd", "acceptance")
    with torch.no_grad():
        ops.bias[:9] = ops.ref.bias[:9] = -math.inf
    few, of_reference = (ll.LMHead(x.weight[9:], x.bias[9:]) for x in (ops, ops.ref))
    reference = ops.ref.hidden, of_reference
    expected = dense_token_stats(ops.hidden, few, ops.labels - 9, want=want, reference=reference)
    with jax.enable_x64(True):
        compare(ops, expected, 1e-10, memory_budget=SMALL // 4)


def test_a_policy_that_forbids_what_its_reference_has():
    ops = operands((6,), v=19, reference=True)
    ops.labels[:] = torch.arange(9, 15)
    with torch.no_grad():
        ops.bias[:9] = -math.inf
    logp = (ops.hidden @ ops.weight[9:].T + ops.bias[9:]).log_softmax(-1)
    logq = (ops.ref.hidden @ ops.ref.weight.T + ops.ref.bias).log_softmax(-1).detach()[:, 9:]
    p, q = logp.exp(), logq.exp()
    expected = {"kl": (p * (logp - logq)).sum(-1), "acceptance": torch.minimum(p, q).sum(-1)}
    with jax.enable_x64(True):
        compare(ops, expected, 1e-10, memory_budget=SMALL)


def test_an_infinite_kl_that_does_not_count():
    """Of a reference that forbids what the policy has: left out of a loss, it leaves the others their gradients."""
    ops = operands((4,), v=7, dtype=torch.float32)
    hidden, head = array(ops.hidden), head_of(ops)
    reference = hidden, LMHead(head.weight, head.bias.at[2].set(-jnp.inf))

    def total(want):
        def loss(hidden, head):
            stats = token_stats(hidden, head, array(ops.labels), want=want, reference=reference)
            rest = jnp.where(jnp.isfinite(stats.kl), stats.kl, 0.0) if "kl" in want else 0.0
            return (stats.entropy + rest).sum()

        return jax.grad(loss, argnums=(0, 1))(hidden, head)

    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, total(("entropy", "kl")), total(("entropy",)))


def test_sums_whose_logits_are_rounded_apart():
    """Of a head of one column and a bias XLA fuses the product into each sum, rounded together with the bias or not."""
    hidden, weight, bias = torch.randn(512, 1), 2 * torch.randn(64, 1), torch.randn(64)
    expected = dense_token_stats(hidden, ll.LMHead(weight, bias), want=("logsumexp",))["logsumexp"]
    found = token_stats(array(hidden), LMHead(array(weight), array(bias)), want=("logsumexp",))
    near(found.logsumexp, expected, 2e-6, "logsumexp")


def test_as_torch_in_single_precision():
    ops = operands((3, 7), h=16, v=211, dtype=torch.float32, reference=True, scale=0.8)
    ops.labels[0, 0] = -100
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=EVERYTHING, reference=ops.reference, top_k=4)
    expected = vars(stats)
    compare(ops, {name: x.float() if x.is_floating_point() else x for name, x in expected.items()}, 2e-6, top_k=4)


def test_bf16_operands_have_single_precision_statistics():
    ops = operands((9,), h=16, v=101).to(torch.bfloat16)
    exact = ops.to(torch.float64)
    expected = dense_token_stats(exact.hidden, exact.head, ops.labels, want=ALONE)
    head = jax.tree.map(lambda x: x.astype(jnp.bfloat16), head_of(ops.to(torch.float32)))
    hidden = array(ops.hidden.float()).astype(jnp.bfloat16)

    def total(hidden, head):
        stats = token_stats(hidden, head, array(ops.labels), want=ALONE)
        return stats.logprob.sum(), stats

    (_, stats), grad = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(hidden, head)
    for name in ALONE:
        near(getattr(stats, name), expected[name], 1e-5, name)
        assert getattr(stats, name).dtype == (jnp.int32 if name == "rank" else jnp.float32)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(grad))
    exact_grads = torch.autograd.grad(expected["logprob"].sum(), [exact.hidden, exact.weight])
    for got, wanted in zip((grad[0], grad[1].weight), exact_grads, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted.numpy(), 2**-7, 1e-2)


def test_a_wide_head_of_narrow_hidden_states():
    """The head's gradient has the digits of the head."""
    ops = operands((9,), h=16, v=101, dtype=torch.float32)
    narrow, exact = ops.hidden.bfloat16(), ops.to(torch.float64)
    logp = (narrow.double() @ exact.weight.T + exact.bias).log_softmax(-1)
    (wanted,) = torch.autograd.grad(logp[range(9), ops.labels].sum(), exact.weight)

    def total(head):
        hidden = array(narrow.float()).astype(jnp.bfloat16)
        return token_stats(hidden, head, array(ops.labels)).logprob.sum()

    near_in_norm(jax.grad(total)(head_of(ops)).weight, wanted, 2e-6, "weight")


def test_all_ignored_and_no_tokens():
    ops = operands((4,), dtype=torch.float32)
    labels = jnp.full((4,), -100)
    poisoned = jnp.full((4, 5), jnp.nan)  # what an ignored token holds reaches nobody

    def total(hidden, head):
        stats = token_stats(hidden, head, labels, want=("logprob", "entropy"), top_k=2)
        return stats.logprob.sum() + stats.entropy.sum(), stats

    (_, stats), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(poisoned, head_of(ops))
    assert not any(np.asarray(x).any() for x in (stats.logprob, stats.entropy, *jax.tree.leaves(grads)))
    assert (np.asarray(stats.top_k_ids) == -1).all()
    empty = token_stats(jnp.zeros((2, 0, 5)), head_of(ops), jnp.zeros((2, 0), int), top_k=3)
    assert empty.logprob.shape == (2, 0)
    assert (empty.top_k_ids.shape, empty.top_k_ids.dtype) == ((2, 0, 3), jnp.int32)


def test_vmap_and_while_loop_give_the_same():
    """A batch of heads at once; and the best entries inside a decoding loop."""
    hidden = jax.random.normal(jax.random.key(0), (2, 6, 5))
    heads = LMHead(jax.random.normal(jax.random.key(1), (2, 17, 5)), softcap=3.0)
    labels = jnp.arange(6)

    def loss(hidden, head):
        return token_stats(hidden, head, labels, want=("logprob", "entropy"), memory_budget=SMALL).entropy.sum()

    each = jax.vmap(jax.grad(loss, argnums=1))(hidden, heads)
    alone = jax.grad(loss, argnums=1)(hidden[1], LMHead(heads.weight[1], softcap=3.0))
    np.testing.assert_allclose(each.weight[1], alone.weight, 2e-6, 2e-6)

    head = LMHead(heads.weight[0])

    def step(state):
        i, token, kept = state
        best = linear_topk(jnp.eye(5)[token % 5][None], head, 4)
        return i + 1, best.ids[0, 0], kept.at[i].set(best.logits[0] - best.logsumexp[0])

    _, _, kept = jax.jit(lambda s: jax.lax.while_loop(lambda s: s[0] < 3, step, s))((0, 0, jnp.zeros((3, 4))))
    token = 0
    for row in np.asarray(kept):
        dense = np.asarray(jax.nn.log_softmax(head.weight @ np.eye(5, dtype=np.float32)[token % 5]))
        np.testing.assert_allclose(row, np.sort(dense)[::-1][:4], 1e-5)
        token = int(dense.argmax())


def test_labels_that_cannot_be_checked_give_nan():
    head = LMHead(jnp.eye(3))
    found = jax.jit(lambda labels: token_stats(jnp.ones((2, 3)), head, labels, want=("logprob", "rank")))
    stats = found(jnp.array([1, 3]))
    assert np.isnan(stats.logprob).tolist() == [False, True]
    assert stats.rank.tolist() == [
        1,
        0,
    ]  # nothing is above its equals; no rank that a share of the best ones would count


@pytest.mark.parametrize("wrong", [np.array([1, 2**32 - 100], np.uint32), np.array([1, 2**32 + 1])])
def test_labels_that_int32_cannot_hold_are_no_others(wrong):
    with jax.enable_x64(True):
        run = jax.jit(lambda labels: token_stats(jnp.ones((2, 3)), LMHead(jnp.eye(3)), labels).logprob)
        found, kept = np.asarray(run(wrong)), np.asarray(run(np.array([1, -100])))
    assert np.isnan(found).tolist() == [False, True]
    assert kept[1] == 0


def test_want_as_any_collection():
    args, want = (jnp.ones((1, 2)), LMHead(jnp.eye(2)), jnp.array([0])), ("entropy", "logprob")
    for given in ((name for name in want), set(want)):
        assert token_stats(*args, want=given).logprob.shape == (1,)


def test_negative_logits_at_the_lowest_temperature():
    head, want = LMHead(jnp.asarray([[-4e5], [-4.5e5]])), ("logprob", "entropy")
    got = token_stats(jnp.ones((1, 1)), head, jnp.array([0]), want=want, temperature=COLDEST)
    assert (got.logprob.item(), got.entropy.item()) == (0.0, 0.0)


def test_another_temperature_compiles_nothing():
    def compiled(temperature):
        seen = []
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: seen.append(event))
        stats = token_stats(jnp.ones((2, 3)), LMHead(jnp.eye(3)), jnp.array([1, 2]), temperature=temperature)
        jax.monitoring.clear_event_listeners()
        np.testing.assert_allclose(stats.logprob, -np.log(3), rtol=1e-6)
        return sum("backend_compile" in event for event in seen)

    assert compiled(0.5) > 0
    assert compiled(0.6) == 0


def test_the_entropy_of_a_sure_token_keeps_its_digits():
    """Of what is left of 1, which a sum with the 1 would swallow."""
    z = -np.arange(40.0)[:, None] / 3 - 13.1
    z[7] = 0.0
    logp = z - np.log(np.exp(z).sum())
    found = token_stats(jnp.ones((1, 1)), LMHead(jnp.asarray(z)), want=("entropy",), memory_budget=SMALL)
    np.testing.assert_allclose(found.entropy, -(np.exp(logp) * logp).sum(), 1e-5)


def test_a_temperature_of_few_digits():
    """What is divided by it keeps those of fp32."""
    temperature = jnp.asarray([0.3, 1.7], jnp.bfloat16)
    of_either = (
        token_stats(jnp.ones((2, 3)), LMHead(jnp.eye(3) * 9), want=("logsumexp",), temperature=t).logsumexp
        for t in (temperature, temperature.astype(jnp.float32))
    )
    np.testing.assert_array_equal(*of_either)


@pytest.mark.parametrize("offset", [0.0, 1000.0, 1e8])
def test_an_offset_takes_no_digits(offset):
    """Of log-probs and what else an offset of all logits does not change, and of cross-entropy."""
    z = torch.randn(12, 70).mul(64).round() / 64 if offset < 1e8 else torch.randn(12, 70).sign() * 8
    head = LMHead(array(torch.cat([z.T, torch.full((70, 1), offset)], 1)))
    hidden, labels = array(torch.cat([torch.eye(12), torch.ones(12, 1)], 1)), np.arange(12)
    logp = z.double().log_softmax(-1)
    got = token_stats(hidden, head, labels, want=("logprob", "entropy"), memory_budget=SMALL)
    near(got.logprob, logp[labels, labels], 1e-6, "logprob")
    near(got.entropy, -(logp.exp() * logp).sum(-1), 1e-6, "entropy")
    near(-linear_cross_entropy(hidden, head, labels, reduction="none"), logp[labels, labels], 1e-6, "loss")
    record = sample_tokens(hidden, head, temperature=0, keep=2)
    exact, rounding = logp.max(-1).values, 2.0**-22 * (offset + 20)
    assert np.abs(record.logprob - exact.numpy()).max() <= rounding  # of two fields, as its docstring says
