"""Run on four host devices by tests/jax/test_mesh.py: sharded heads give what one device gives."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from logitless.errors import OptionError, ShapeError
from logitless.jax import LMHead, Noise, linear_cross_entropy, linear_topk, sample_tokens, token_stats

EVERYTHING = (
    "logprob",
    "entropy",
    "mean_logit",
    "max_logit",
    "rank",
    "sum_sq_prob",
    "kl",
    "reverse_kl",
    "jsd",
    "reverse_kl_mixture",
    "acceptance",
)
OPTIONS = {"want": EVERYTHING, "top_k": 3, "memory_budget": 6000}


def operands(v, padded, n=6, h=5):
    """Hidden states, a head whose last rows do not exist and hold NaN, labels, a reference, random cotangents."""
    keys = iter(jax.random.split(jax.random.key(v), 8))

    def head(h):
        weight = jax.random.normal(next(keys), (padded, h)).at[v:].set(jnp.nan)
        return LMHead(weight, jax.random.normal(next(keys), (padded,)).at[v:].set(jnp.nan), 0.8, 5.0, v)

    hidden, ref_hidden = jax.random.normal(next(keys), (n, h)), jax.random.normal(next(keys), (n, h + 1))
    labels = jax.random.randint(next(keys), (n,), 0, v).at[1].set(-100).at[0].set(v - 1)
    return hidden, head(h), labels, (ref_hidden, head(h + 1))


def floats(stats):
    return {name: x for name, x in vars(stats).items() if name not in ("rank", "top_k_ids")}


def weighted(stats):
    """A number that every statistic moves."""
    return sum((jnp.cos(jnp.arange(x.size) + i) * x.ravel()).sum() for i, x in enumerate(floats(stats).values()))


def check(got, expected, tolerance=1e-10):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), got, expected)


def vocabulary_alone():
    """Four devices share the rows; the last one holds nothing but padding. Gradients inside and outside."""
    mesh = jax.make_mesh((4,), ("v",), axis_types=(AxisType.Auto,))
    args = operands(v=9, padded=12)
    specs = (P(), P("v"), P(), (P(), P("v")))

    def scored(axis, hidden, head, labels, reference):
        stats = token_stats(hidden, head, labels, reference=reference, axis_name=axis, **OPTIONS)
        return weighted(stats), stats

    both = partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    inside = jax.shard_map(both(partial(scored, "v")), mesh=mesh, in_specs=specs, out_specs=((P(), P()), (P(), P("v"))))
    outside = both(jax.shard_map(partial(scored, "v"), mesh=mesh, in_specs=specs, out_specs=(P(), P())))
    expected = jax.jit(both(partial(scored, None)))(*args)
    for run in (inside, outside):
        (_, stats), (hidden, head) = jax.jit(run)(*args)
        check(vars(stats), vars(expected[0][1]))
        check(hidden, expected[1][0])
        check((head.weight[:9], head.bias[:9]), (expected[1][1].weight[:9], expected[1][1].bias[:9]))


def every_device_has_the_same_bits():
    mesh = jax.make_mesh((4,), ("v",), axis_types=(AxisType.Auto,))
    hidden, head, labels, _ = operands(v=9, padded=12)

    def each(hidden, head, labels):
        stats = token_stats(hidden, head, labels, want=("logprob", "entropy"), axis_name="v")
        return lax.pcast((stats.logprob, stats.entropy), ("v",), to="varying")

    logprob, entropy = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P(), P("v"), P()), out_specs=P("v")))(
        hidden, head, labels
    )
    for x in (logprob, entropy):
        rows = np.asarray(x).reshape(4, -1)
        assert (rows == rows[0]).all()


def tokens_and_vocabulary():
    """Two by two: tokens over one axis, the vocabulary over the other; the losses add up."""
    mesh = jax.make_mesh((2, 2), ("d", "v"), axis_types=(AxisType.Auto,) * 2)
    hidden, head, labels, _ = operands(v=23, padded=24)
    count = float((labels != -100).sum())

    def loss(hidden, head, labels):
        part = linear_cross_entropy(
            hidden, head, labels, denominator=count, label_smoothing=0.1, axis_name="v", memory_budget=3000
        )
        return lax.psum(part, "d")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P("d"), P("v"), P("d")), out_specs=P())
    got = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)))(hidden, head, labels)
    alone = partial(linear_cross_entropy, label_smoothing=0.1)
    expected = jax.jit(jax.value_and_grad(alone, argnums=(0, 1)))(hidden, head, labels)
    check(got[0], expected[0])
    check(got[1][0], expected[1][0])
    check((got[1][1].weight[:23], got[1][1].bias[:23]), (expected[1][1].weight[:23], expected[1][1].bias[:23]))


def tokens_for_any_number_of_devices():
    """Drawn from all entries, from nuclei within and beyond the best, greedily: the record of one device."""
    hidden, head, _, _ = operands(v=203, padded=208, n=8)
    noise = Noise(jnp.arange(8), jnp.arange(8) + 2)
    far = {"top_p": 0.99, "temperature": 3.0}
    for rules in ({}, {"top_p": 0.5, "temperature": 0.5}, far, {"temperature": 0.0}):
        expected = sample_tokens(hidden, head, noise, **rules)
        for devices in (2, 4) if rules is far else (4,):
            mesh = jax.make_mesh((4 // devices, devices), ("d", "v"), axis_types=(AxisType.Auto,) * 2)

            def each(hidden, head, noise, rules=rules):
                best = linear_topk(hidden, head, 5, axis_name="v")
                return sample_tokens(hidden, head, noise, axis_name="v", memory_budget=8000, **rules), best

            run = jax.shard_map(each, mesh=mesh, in_specs=(P("d"), P("v"), P("d")), out_specs=P("d"))
            got, best = jax.jit(run)(hidden, head, noise)
            check(got, expected)
            check((best.logits, best.ids), (expected.topk_logits[:, :5], expected.topk_ids[:, :5]))


def what_varies_alone():
    """Seeds of its own for each device, or a denominator, beside the same tokens on all."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    hidden, head, labels, _ = operands(v=23, padded=23)

    def draw(seeds, hidden, head):
        return sample_tokens(hidden, head, Noise(seeds, jnp.arange(6)), top_p=0.9).token[None]

    def scaled(count, hidden, head, labels):
        return jax.grad(lambda h: linear_cross_entropy(h, head, labels, denominator=count[0]))(hidden)[None]

    seeds, counts = jnp.arange(4), jnp.arange(1.0, 5)
    run = jax.shard_map(draw, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P("d"))
    alone = jax.jit(draw)
    check(jax.jit(run)(seeds, hidden, head), jnp.stack([alone(seeds[i : i + 1], hidden, head)[0] for i in range(4)]))
    run = jax.shard_map(scaled, mesh=mesh, in_specs=(P("d"), P(), P(), P()), out_specs=P("d"))
    alone = jax.jit(scaled)
    each = jnp.concatenate([alone(counts[i : i + 1], hidden, head, labels) for i in range(4)])
    check(
        jax.jit(run)(counts, hidden, head, labels), jnp.broadcast_to(each.sum(0), each.shape)
    )  # of tokens that all have


def what_would_be_merged_wrongly_is_refused():
    """A reference whose rows are shared out otherwise, and what the axis of the vocabulary has other tokens of."""
    mesh = jax.make_mesh((4,), ("v",), axis_types=(AxisType.Auto,))
    hidden, head, labels, (ref_hidden, _) = operands(v=9, padded=12, n=8)
    longer = operands(v=9, padded=16)[3][1]

    def refused(error, words, call, specs, *args):
        with pytest.raises(error, match=words):
            jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P()), *args)

    def against(hidden, head, ref_hidden, ref_head):
        return token_stats(hidden, head, want=("kl",), reference=(ref_hidden, ref_head), axis_name="v").kl

    specs = P(), P("v"), P(), P("v")
    refused(ShapeError, "expected 3 rows on each device, .* got 4", against, specs, hidden, head, ref_hidden, longer)

    def stats(hidden, head, temperature):
        return token_stats(hidden, head, want=("entropy",), temperature=temperature, axis_name="v").entropy

    def draw(hidden, head, temperature):
        return sample_tokens(hidden, head, Noise(1, 0), temperature=temperature, keep=1, axis_name="v").token

    def keyed(hidden, head, keys):
        return sample_tokens(hidden, head, keys[0], keep=1, axis_name="v").token

    one, warm = jnp.ones(()), jnp.ones(8)
    for call in (stats, draw):
        refused(OptionError, "hidden: expected the same on", call, (P("v"), P("v"), P()), hidden, head, one)
        refused(OptionError, "temperature: expected the same", call, (P(), P("v"), P("v")), hidden[:2], head, warm)

    def scaled(hidden, head, labels, counts):
        return linear_cross_entropy(hidden, head, labels, denominator=counts[0], axis_name="v")

    specs = P(), P("v"), P(), P("v")
    refused(OptionError, "denominator: expected the same", scaled, specs, hidden, head, labels, jnp.ones(4))
    keys = jax.random.split(jax.random.key(0), 4)
    refused(OptionError, "noise: expected the same", keyed, (P(), P("v"), P("v")), hidden, head, keys)


def gathered_tokens_are_not_refused():
    """What the error advises, and its gradient."""
    mesh = jax.make_mesh((4,), ("v",), axis_types=(AxisType.Auto,))
    hidden, head, labels, _ = operands(v=9, padded=12, n=8)

    def loss(hidden, head, labels):
        every = lax.all_gather(hidden, "v", tiled=True, to="invarying")
        return linear_cross_entropy(every, head, labels, axis_name="v")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P("v"), P("v"), P()), out_specs=P())
    got, expected = (jax.jit(jax.value_and_grad(f))(hidden, head, labels) for f in (sharded, linear_cross_entropy))
    check(got, expected)


def a_key_gives_each_device_noise_of_its_own():
    """Of the same hidden states everywhere: tokens over one axis, the vocabulary over the other."""
    mesh = jax.make_mesh((2, 2), ("d", "v"), axis_types=(AxisType.Auto,) * 2)
    draw = partial(sample_tokens, axis_name="v", keep=0)
    run = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=(P("d"), P("v"), P()), out_specs=P("d")))
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        token = run(jnp.ones((8, 1)), LMHead(jnp.zeros((100_000, 1))), key).token
        assert len(set(np.asarray(token).tolist())) == 8


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
