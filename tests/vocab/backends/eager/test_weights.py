"""A loss's weights relative to a level that stays from slice to slice, and moves where an entry is far above it."""

import pytest
import torch

import logitless as ll
from logitless.algebra.costs import WHOLE_WIDTH
from logitless.vocab.backends.eager import backend
from logitless.vocab.backends.eager.weights import MOST, weigh
from tests.support.vocab.comparing import assert_near_in_norm, operands

SLICES = 4
EPS = 2.0**-24  # of rounding in fp32


def loss_of(x):
    loss = ll.linear_cross_entropy(x.hidden, x.head, x.labels, z_loss=1e-3, backend="eager")
    loss.backward()
    return loss.detach().double(), {name: leaf.grad.double() for name, leaf in x.leaves.items()}


def dense(x):
    z = x.hidden @ x.weight.t() * x.transform.get("scale", 1.0) + (0 if x.bias is None else x.bias)
    loss = torch.nn.functional.cross_entropy(z, x.labels) + 1e-3 * z.logsumexp(1).square().mean()
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in x.leaves.items()}


def raised(x, entries, by):
    """The same operands where some entries' logits are higher for the first half of the tokens."""
    with torch.no_grad():
        x.hidden.mul_(0.2)
        x.hidden[:, 0], x.weight[:, 0] = 0.0, 0.0
        x.hidden[: len(x.hidden) // 2, 0] = 1.0
        x.weight[entries, 0] = by
    return x


@pytest.fixture
def made_again(monkeypatch):
    """Of each slice that was weighed by the level before it, whether its logits had to be made again."""
    found = []

    def seen(z, level):
        total = weigh(z, level)
        found.append(total is None)
        return total

    monkeypatch.setattr(backend, "weigh", seen)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("entries", "by", "again", "above"),
    [
        pytest.param([], 0.0, [], 0.0, id="flat"),
        pytest.param([1], 40.0, [], 0.0, id="a maximum in the first slice"),
        pytest.param([WHOLE_WIDTH + 1], 7.0, [], 7.0, id="one a little above it"),
        pytest.param([SLICES * WHOLE_WIDTH - 9], 20.0, [SLICES - 2], 0.0, id="one far above it in the last"),
        pytest.param([WHOLE_WIDTH, 3 * WHOLE_WIDTH + 1], 90.0, [0], 0.0, id="which exceeds fp32"),
        pytest.param(
            [WHOLE_WIDTH, 2 * WHOLE_WIDTH, 3 * WHOLE_WIDTH],
            torch.tensor([15.0, 30, 45]),
            [0],
            0.0,
            id="ever higher: once is enough",
        ),
    ],
)
def test_gradients_are_float64s(entries, by, again, above, bias, made_again):
    given = operands((120,), 24, SLICES * WHOLE_WIDTH - 5, dtype=torch.float32, bias=bias)
    x = raised(given.training("hidden", "weight", "bias"), entries, by)
    exact = x.to(torch.float64)
    (loss, grads), (right, right_grads) = loss_of(x), dense(exact)
    plain, plain_grads = dense(x.to(torch.float32))
    weighed = SLICES - 1 if not again else again[0] + 1  # a level that was too low once is trusted no more
    assert made_again == [i in again for i in range(weighed)]
    assert (loss - right).abs() <= 2 * (plain - right).abs() + 3e-7 * right.abs()
    floor = 3e-7 + 2 * EPS * above  # what is above the level is rounded there, and where exp2 takes a scaled number
    for name, g in grads.items():
        most = (plain_grads[name] - right_grads[name]).norm() / right_grads[name].norm()
        assert_near_in_norm(g, right_grads[name], 1.5 * float(most) + floor, name)


def test_tokens_without_a_possible_entry_in_the_first_slice(made_again):
    """The level is that of no entry, far below all that follow."""
    x = operands((40,), 8, 2 * WHOLE_WIDTH + 7, dtype=torch.float32).training("hidden", "weight", "bias")
    assert x.bias is not None
    assert x.labels is not None
    with torch.no_grad():
        x.bias[:WHOLE_WIDTH] = -torch.inf
        x.labels.clamp_(min=WHOLE_WIDTH)
    exact = x.to(torch.float64)
    (loss, grads), (right, right_grads) = loss_of(x), dense(exact)
    assert made_again[0]
    torch.testing.assert_close(loss, right, rtol=1e-6, atol=1e-6)
    for name, g in grads.items():
        assert_near_in_norm(g, right_grads[name].nan_to_num(0.0), 2e-6, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adapters_and_class_weights(dtype, made_again):
    given = operands((120,), 24, SLICES * WHOLE_WIDTH - 5, dtype=dtype, ranks=(4, 3), spread=0.5)
    x = given.training("hidden", "weight", "bias", "a", "b")
    exact, plain = x.to(torch.float64), x.to(dtype)
    weights = torch.rand(len(x.weight), dtype=dtype)
    ll.linear_cross_entropy(x.hidden, x.head, x.labels, weight=weights, backend="eager").backward()
    for y in (exact, plain):
        assert y.bias is not None
        z = y.hidden @ y.weight.t() + y.bias + sum(a.scaling * (y.hidden @ a.a.t()) @ a.b.t() for a in y.adapters)
        torch.nn.functional.cross_entropy(z, y.labels, weight=weights.to(z.dtype)).backward()
    assert made_again == [False] * (SLICES - 1)
    for name, leaf in x.leaves.items():
        right = exact.leaves[name].grad
        most = (plain.leaves[name].grad.double() - right).abs().max() / right.abs().max()
        floor = 6e-7 if dtype == torch.float32 else 1e-12
        assert_near_in_norm(leaf.grad.double(), right, 1.5 * float(most) + floor, name)


def test_the_largest_logit_is_found_wherever_it_lies(made_again):
    """A level is no maximum."""
    x = raised(operands((60,), 24, 3 * WHOLE_WIDTH, dtype=torch.float32).training("hidden"), [2 * WHOLE_WIDTH + 5], 6.0)
    seen = []

    def loss(stats):
        seen.append(stats.max_logit.detach())
        return -stats.logprob

    ll.token_loss(loss, x.hidden, x.head, x.labels, want=("logprob", "max_logit"), backend="eager").backward()
    right = torch.nn.functional.linear(x.hidden, x.weight, x.bias).detach().amax(1)
    torch.testing.assert_close(torch.cat(seen), right, rtol=1e-6, atol=1e-5)
    assert not made_again


def test_nan_is_seen(made_again):
    x = operands((40,), 8, 3 * WHOLE_WIDTH, dtype=torch.float32).training("hidden")
    with torch.no_grad():
        x.hidden[3] = torch.nan
    loss, grads = loss_of(x)
    assert loss.isnan()
    assert grads["hidden"][3].isnan().all()
    assert not grads["hidden"][4].isnan().any()


def test_a_level_too_low_is_found():
    z = torch.zeros(3, int(MOST) + 1)
    assert weigh(z.clone(), torch.zeros(3)) is None
    below = weigh(z[:, 1:-1].clone(), torch.zeros(3))
    assert below is not None
    assert below.tolist() == [MOST - 1] * 3
    assert weigh(z[:, :2].clone(), torch.tensor([0.0, torch.nan, 0.0])) is None
    assert weigh(z[:, :2].clone(), torch.tensor([0.0, -1e30, 0.0])) is None
