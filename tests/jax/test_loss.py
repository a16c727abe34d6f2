"""`logitless.jax.linear_cross_entropy` against the dense oracle and torch; memory of the whole pass."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'logitless[jax]'")

import jax.numpy as jnp  # noqa: E402

from logitless.jax import LMHead, linear_cross_entropy, linear_topk, token_stats  # noqa: E402
from logitless.vocab.reference import dense_cross_entropy  # noqa: E402
from tests.support.jax.comparing import array, head_of, near, near_in_norm  # noqa: E402
from tests.support.vocab.comparing import operands  # noqa: E402

BUDGET = 8000  # bytes: several chunks of tokens and several slices, both ragged


@pytest.mark.parametrize(
    ("transform", "options"),
    [
        ({}, {}),
        ({"scale": 0.5, "vocab_size": 37}, {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-2}),
        ({"softcap": 2.0}, {"denominator": 3.0, "temperature": 0.7, "label_smoothing": 0.2}),
        ({}, {"reduction": "none", "z_loss": 0.1}),
    ],
    ids=["plain", "padded", "softcap", "none"],
)
def test_loss_and_gradients_against_the_oracle(transform, options):
    ops = operands((13,), h=7, v=41, **transform)
    ops.labels[5] = -100
    expected = dense_cross_entropy(ops.hidden, ops.head, ops.labels, **options)
    up = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, [ops.hidden, ops.weight, ops.bias], up)

    @jax.jit
    def both(hidden, head, labels):
        loss, pull = jax.vjp(
            lambda hidden, head: linear_cross_entropy(hidden, head, labels, memory_budget=BUDGET, **options),
            hidden,
            head,
        )
        return loss, pull(array(up))

    with jax.enable_x64(True):
        loss, (hidden, head) = both(array(ops.hidden), head_of(ops), array(ops.labels))
        value = linear_cross_entropy(array(ops.hidden), head_of(ops), array(ops.labels), **options)
        near(loss, expected, 1e-10, "loss")
        near(value, expected, 1e-10, "the loss alone")
        for got, grad in zip((hidden, head.weight, head.bias), wanted, strict=True):
            near_in_norm(got, grad, 2e-10, "gradient")


def test_gradients_where_a_device_multiplies_fp16(monkeypatch):
    """A mean makes less of p than fp16 holds, and a loss scale more."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    n, v, scale = 4096, 4001, 1024.0
    hidden, weight = (torch.randn(rows, 8).half() for rows in (n, v))
    weight[:] *= 0.1
    labels = torch.zeros(n, dtype=torch.long)
    p = (hidden.double() @ weight.double().T).softmax(-1)

    def loss(weight):
        return scale * linear_cross_entropy(array(hidden), LMHead(weight), array(labels))

    near_in_norm(jax.grad(loss)(array(weight))[1:] / scale, (p.T @ hidden.double() / n)[1:], 1e-3, "weight")

    def scaled(hidden):
        return 2.0**17 * token_stats(hidden, LMHead(array(weight * 1e-3)), array(labels[:1])).logprob.sum()

    assert np.isfinite(jax.grad(scaled)(array(hidden[:1]))).all()


def test_mean_over_no_token_is_zero():
    labels = jnp.full((3,), -100)
    hidden, head = jnp.full((3, 4), jnp.nan), LMHead(jnp.ones((5, 4)))
    loss, grads = jax.value_and_grad(linear_cross_entropy, argnums=(0, 1))(hidden, head, labels)
    assert loss == 0
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(grads))
    assert linear_cross_entropy(hidden[:0], head, labels[:0]) == 0


@pytest.mark.parametrize("ignored", [-1, 3])
def test_an_ignored_label_of_any_number(ignored):
    """As -100 is; an id of the vocabulary, too."""
    ops = operands((8,), v=19, dtype=torch.float32)
    labels = np.where(ops.labels == 3, 4, ops.labels)
    usual, own = (np.where(np.arange(8) < 3, mark, labels) for mark in (-100, ignored))
    both, hidden, head = jax.value_and_grad(linear_cross_entropy), array(ops.hidden), head_of(ops)
    found = both(hidden, head, own, ignore_index=ignored)
    jax.tree.map(np.testing.assert_array_equal, found, both(hidden, head, usual))


N, H, V = 512, 64, 8192
MEMORY = 1 << 20  # the budget: a sixteenth of the logits, half of the head's gradient


def _compiled(function, *args):
    return jax.jit(function).lower(*args).compile()


def _memory(function, *args):
    return _compiled(function, *args).memory_analysis()


@pytest.mark.parametrize("trained", [0, (0, 1)], ids=["hidden", "hidden and head"])
@pytest.mark.parametrize("loss", ["loss", "stats"])
def test_no_temporary_of_the_logits_size(loss, trained):
    hidden, head, labels = jnp.ones((N, H)), LMHead(jnp.ones((V, H))), jnp.zeros((N,), int)

    def total(hidden, head, labels):
        if loss == "loss":
            return linear_cross_entropy(hidden, head, labels, memory_budget=MEMORY)
        stats = token_stats(hidden, head, labels, want=("logprob", "entropy"), memory_budget=MEMORY)
        return (stats.logprob * stats.entropy).sum()

    memory = _memory(jax.grad(total, argnums=trained), hidden, head, labels)
    head_gradient = 4 * V * H if trained else 0  # neither made nor kept for a frozen head
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2 * MEMORY + head_gradient


def test_few_tokens_keep_to_the_budget():
    """Too few for a copy of the head's slices to be worth it."""

    def best(hidden, head):
        return linear_topk(hidden, head, 3, memory_budget=1 << 17)

    used = _memory(best, jnp.ones((8, H)), LMHead(jnp.ones((V, H)))).temp_size_in_bytes
    assert used < 1 << 18  # of the logits' 2¹⁸, and what is made of them


@pytest.fixture(scope="module", params=["loss", "stats"])
def plain(request):
    """A loss of hidden states and a head, and its compiled gradient."""
    labels = jnp.zeros((N,), int)

    def total(hidden, head):
        if request.param == "loss":
            return linear_cross_entropy(hidden, head, labels, memory_budget=MEMORY)
        return token_stats(hidden, head, labels, want=("logprob", "entropy"), memory_budget=MEMORY).entropy.sum()

    return total, _compiled(jax.grad(total, argnums=(0, 1)), jnp.ones((N, H)), LMHead(jnp.ones((V, H))))


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable"])
def test_no_policy_of_checkpoints_keeps_logits(plain, policy):
    total, usual = plain
    hidden, head = jnp.ones((N, H)), LMHead(jnp.ones((V, H)))
    checkpointed = jax.checkpoint(total, policy=getattr(jax.checkpoint_policies, policy))
    remade = _compiled(jax.grad(checkpointed, argnums=(0, 1)), hidden, head)
    memory, least = (run.memory_analysis().temp_size_in_bytes for run in (remade, usual))
    assert memory < 1.1 * least + 4 * V * H
    jax.tree.map(np.testing.assert_array_equal, remade(hidden, head), usual(hidden, head))


def test_dense_shows_that_the_measure_can_fail():
    def dense(hidden, weight):
        return -jax.nn.log_softmax(hidden @ weight.T)[:, 0].mean()

    used = _memory(jax.grad(dense, argnums=(0, 1)), jnp.ones((N, H)), jnp.ones((V, H))).temp_size_in_bytes
    assert used >= 4 * N * V


def test_checkpointed_microbatches_add_up():
    """The gradient of a scan over parts of a batch, each computed anew in backward, is the batch's."""
    ops = operands((8,), v=19, dtype=torch.float32)
    hidden, head, labels = array(ops.hidden), head_of(ops), array(ops.labels)

    def parts(head):
        @jax.checkpoint
        def step(total, part):
            return total + linear_cross_entropy(part[0], head, part[1], reduction="sum"), None

        return jax.lax.scan(step, 0.0, (hidden.reshape(2, 4, -1), labels.reshape(2, 4)))[0]

    whole = jax.grad(lambda head: linear_cross_entropy(hidden, head, labels, reduction="sum"))(head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), jax.jit(jax.grad(parts))(head), whole)
